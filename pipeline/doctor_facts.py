"""What is installed on this machine that engines are built and run with: `kiln doctor`'s first half.

Looks, and changes nothing: asks the driver, compilers and packages for their versions, and ONNX Runtime for its
providers. What a library does when it is loaded is tried in a child process, because a broken one may crash it. Knows
nothing of SKUs; what they need is in `pipeline.doctor`.
"""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

from engines.sku import host_cpu_features, host_memory
from engines.sku_detect import Gpu, NoDriverError, jetson_from_device_tree, own_gpus
from pipeline.compare.machine import machine_description, package_versions
from plugins.build import current_cpu_library, find_compiler
from plugins.cuda_build import current_cuda_library, find_nvcc
from plugins.errors import KilnError

PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "polygraphy", "triton")
"""Distributions whose versions are shown; without a version here one is not installed."""
_OS_RELEASE = Path("/etc/os-release")
_CHILD_SECONDS = 120
_PROVIDERS = """
import json, sys, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}))
"""
_SESSION = """
import sys, onnx, onnxruntime
from onnx import TensorProto, helper
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", values[:1], values[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[sys.argv[1]])
sys.exit(sys.argv[1] not in session.get_providers())
"""
_IMPORT = "import importlib, sys; print(importlib.import_module(sys.argv[1]).__version__)"


@dataclass(frozen=True)
class Fact:
    """One thing that was looked for: its version or kind as `found`, or None and the `problem`."""

    name: str
    found: str | None
    problem: str = ""
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.found is not None


@dataclass(frozen=True)
class Machine:
    """What this machine has. `providers` are those that ONNX Runtime offers; `cuda_provider`: does CUDA's work?"""

    distribution: str
    python: str
    is_root: bool
    cpu_features: frozenset[str]
    memory: int
    board: str | None
    gpus: tuple[Gpu, ...]
    driver: Fact
    cuda: Fact
    nvcc: Fact
    compiler: Fact
    runtime: Fact
    runtime_packages: tuple[str, ...]
    providers: tuple[str, ...]
    cuda_provider: Fact
    tensorrt: Fact
    tensorrt_rtx: Fact
    cpu_plugins: Fact
    cuda_plugins: Fact
    packages: dict[str, str]
    description: dict[str, str]

    def facts(self) -> list[Fact]:
        """For showing, in order."""
        return [
            self.driver,
            self.cuda,
            self.nvcc,
            self.compiler,
            self.runtime,
            self.cuda_provider,
            self.tensorrt,
            self.tensorrt_rtx,
            self.cpu_plugins,
            self.cuda_plugins,
            *(
                Fact(name, self.packages.get(name), "" if name in self.packages else "not installed")
                for name in PACKAGES
            ),
        ]


def inspect_machine() -> Machine:
    """Look at everything; takes a few seconds, most of them for starting child processes."""
    gpus, driver = _driver()
    runtime, providers = _runtime()
    return Machine(
        distribution=_distribution(),
        python=sys.executable,
        is_root=os.geteuid() == 0,
        cpu_features=host_cpu_features(),
        memory=host_memory(),
        board=jetson_from_device_tree(),
        gpus=gpus,
        driver=driver,
        cuda=_cuda(),
        nvcc=_tool("CUDA compiler", find_nvcc),
        compiler=_tool("C++ compiler", find_compiler),
        runtime=runtime,
        runtime_packages=_runtime_packages(),
        providers=providers,
        cuda_provider=_provider("CUDAExecutionProvider", providers),
        tensorrt=_module("TensorRT", "tensorrt"),
        tensorrt_rtx=_module("TensorRT-RTX", "tensorrt_rtx"),
        cpu_plugins=_library("CPU plugins", current_cpu_library),
        cuda_plugins=_library("CUDA plugins", current_cuda_library),
        packages=package_versions(*PACKAGES),
        description=machine_description(),
    )


def _distribution(path: Path = _OS_RELEASE) -> str:
    """The distribution's id, or the one that it is like: debian, ubuntu, fedora, suse, arch, alpine."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    values = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
    known = ("ubuntu", "debian", "fedora", "suse", "arch", "alpine")
    names = [values.get("ID", ""), *values.get("ID_LIKE", "").split()]
    return next((name for name in names if name in known), names[0])


def _driver() -> tuple[tuple[Gpu, ...], Fact]:
    try:
        gpus = own_gpus()
    except NoDriverError as error:
        return (), Fact("NVIDIA driver", None, str(error))
    driver = next((gpu.driver for gpu in gpus if gpu.driver), "the board's own" if jetson_from_device_tree() else None)
    if driver is None:
        return tuple(gpus), Fact("NVIDIA driver", None, "nvidia-smi lists no GPU")
    return tuple(gpus), Fact("NVIDIA driver", driver, where=f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}")


def _cuda() -> Fact:
    """The newest CUDA that the driver runs (cuDriverGetVersion: 1000 * major + 10 * minor)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Fact("CUDA driver", None, "libcuda.so.1 cannot be loaded")
    found = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(found)) != 0:
        return Fact("CUDA driver", None, "libcuda.so.1 does not tell its version")
    return Fact("CUDA driver", f"{found.value // 1000}.{found.value % 1000 // 10}", where="libcuda.so.1")


def _tool(name: str, find: Callable[[], list[str]]) -> Fact:
    try:
        command = find()
    except KilnError as error:
        return Fact(name, None, str(error).partition(";")[0])
    answer, problem = _run([*command, "--version"])
    if answer is None:
        return Fact(name, None, f"{' '.join(command)} --version failed: {problem}")
    release = re.search(r"release [\d.]+", answer)
    return Fact(name, release[0] if release else answer.splitlines()[0], where=" ".join(command))


def _runtime() -> tuple[Fact, tuple[str, ...]]:
    answer, problem = _run([sys.executable, "-c", _PROVIDERS])
    if answer is None:
        return Fact("ONNX Runtime", None, problem), ()
    found = json.loads(answer.splitlines()[-1])
    providers = tuple(found["providers"])
    return Fact("ONNX Runtime", found["version"], where=", ".join(providers)), providers


def _runtime_packages() -> tuple[str, ...]:
    """Distributions that bring the package `onnxruntime`: two of them overwrite each other's files."""
    names = sorted(set(packages_distributions().get("onnxruntime", ())))
    return tuple(f"{name} {version(name)}" for name in names)


def _provider(name: str, providers: Sequence[str]) -> Fact:
    if name not in providers:
        return Fact(name, None, "the installed ONNX Runtime has none")
    answer, problem = _run([sys.executable, "-c", _SESSION, name])
    return Fact(name, None, problem) if answer is None else Fact(name, "runs a graph")


def _module(title: str, name: str) -> Fact:
    try:
        missing = importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        return Fact(title, None, f"no Python module {name}")
    answer, problem = _run([sys.executable, "-c", _IMPORT, name])
    return Fact(title, None, problem) if answer is None else Fact(title, answer, where=f"Python module {name}")


def _library(name: str, find: Callable[[], Path | None]) -> Fact:
    try:
        path = find()
    except KilnError as error:
        return Fact(name, None, str(error).partition(";")[0])
    return Fact(name, "compiled", where=str(path)) if path else Fact(name, None, "not compiled yet")


def _run(command: Sequence[str]) -> tuple[str | None, str]:
    """What a command printed, or None and what it complained of, in one line."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if answer.returncode == 0:
        return answer.stdout.strip(), ""
    if answer.returncode < 0:
        return None, f"the process died of signal {-answer.returncode}"
    return None, complaint(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"


def complaint(text: str) -> str:
    """What a failed process says that helps: the library that is missing, else its last line; no terminal colours."""
    if missing := re.search(r"(lib[\w.+-]+): cannot open shared object file", text):
        return f"{missing[1]} cannot be found"
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).strip().splitlines()
    return lines[-1][:300] if lines else ""
