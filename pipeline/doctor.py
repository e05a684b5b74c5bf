"""What each SKU needs of this machine, what of it is missing, and the command that installs it: `kiln doctor`.

Judges the facts of `pipeline.doctor_facts`, so that any machine can be judged from its description. Whether Kiln itself
is finished for a SKU comes from `pipeline.buildable`, which `build-engine` asks too.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engines.sku import Sku
from engines.sku_detect import match_gpu
from pipeline.buildable import attention_problem, unfinished_backend
from pipeline.doctor_facts import Machine

Stage = Literal["build", "run"]
OLDEST_DRIVER = 580
"""NVIDIA's CUDA 13 release notes: the first driver branch that runs CUDA 13, which onnxruntime-gpu and TensorRT use."""
_INSTALL = {
    "debian": "apt-get install -y {}",
    "ubuntu": "apt-get install -y {}",
    "fedora": "dnf install -y {}",
    "suse": "zypper install -y {}",
    "arch": "pacman -S --noconfirm {}",
    "alpine": "apk add {}",
}
_CXX = {"debian": "g++", "ubuntu": "g++", "fedora": "gcc-c++", "suse": "gcc-c++", "arch": "gcc", "alpine": "build-base"}
_DRIVERS = {
    "debian": "apt-get install -y cuda-drivers",
    "ubuntu": f"ubuntu-drivers install nvidia:{OLDEST_DRIVER}",
    "fedora": "dnf install -y cuda-drivers",
    "suse": "zypper install -y cuda-drivers",
    "arch": "pacman -S --noconfirm nvidia-open",
}
_FROM_NVIDIA = "cuda-drivers"
"""A package of NVIDIA's own repository: Debian's, Fedora's and SUSE's drivers are older or not in theirs."""
_NVCC = "'cuda-toolkit[nvcc,cudart,crt,cccl,nvvm]==13.*'"
_IN_NVIDIA = 'import nvidia, pathlib; print({}({} for f in nvidia.__path__ for p in pathlib.Path(f).glob("{}")))'
"""Of what pip's CUDA packages brought."""
_BOTH: tuple[Stage, ...] = ("build", "run")


@dataclass(frozen=True)
class Need:
    """One thing that a SKU needs for `stages`. `problem` is empty where it is there; `command` mends it."""

    name: str
    stages: tuple[Stage, ...]
    problem: str = ""
    command: str | None = None

    @property
    def met(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Verdict:
    """Whether a machine builds and runs engines for a SKU. `optional` is what some models or sources need besides."""

    sku: str
    needs: tuple[Need, ...]
    optional: tuple[Need, ...] = ()

    @property
    def missing(self) -> list[Need]:
        return [need for need in self.needs if not need.met]

    def can(self, stage: Stage) -> bool:
        return not any(stage in need.stages for need in self.missing)

    def to_dict(self) -> dict[str, Any]:
        return {
            "sku": self.sku,
            "builds": self.can("build"),
            "runs": self.can("run"),
            "missing": [asdict(need) for need in self.missing],
            "optional": [asdict(need) for need in self.optional if not need.met],
        }


def judge(sku: Sku, machine: Machine) -> Verdict:
    """What the SKU needs, judged on this machine."""
    needs = [_finished(sku)]
    if sku.is_cpu:
        needs += [_cpu(sku, machine), _runtime(machine)]
    else:
        stages: tuple[Stage, ...] = _BOTH if sku.backend == "tensorrt" else ("run",)
        needs += [_gpu(sku, machine, stages), _driver(machine, stages)]
        needs += _tensorrt(sku, machine) if sku.backend == "tensorrt" else _cuda(machine)
    return Verdict(sku.name, tuple(needs), tuple(_optional(sku, machine)))


def commands(verdicts: Sequence[Verdict]) -> list[str]:
    """What to run for all that is missing, each once, in an order that works."""
    needs = [need for verdict in verdicts for need in verdict.missing]
    return list(dict.fromkeys(need.command for need in needs if need.command))


def own_skus(table: Sequence[Sku], machine: Machine) -> list[str]:
    """Names of the SKUs that this machine is: the CPU types that it can run, and its GPUs'."""
    by_name = {sku.name: sku for sku in table}
    cpus = [sku.name for sku in table if sku.is_cpu and machine.cpu_features.issuperset(sku.cpu_features)]
    gpus = [match.sku.name for gpu in machine.gpus if (match := match_gpu(gpu, by_name)).sku]
    return list(dict.fromkeys([*cpus, *gpus]))


def _finished(sku: Sku) -> Need:
    return Need("Kiln's backend", _BOTH, unfinished_backend(sku) or "")


def _cpu(sku: Sku, machine: Machine) -> Need:
    missing = sorted(set(sku.cpu_features) - machine.cpu_features)
    return Need("CPU", _BOTH, f"this CPU lacks {', '.join(missing)}: use a machine that has them" if missing else "")


def _runtime(machine: Machine) -> Need:
    name = "ONNX Runtime"
    if not machine.runtime.ok:
        return Need(name, _BOTH, machine.runtime.problem, _pip(machine, "onnxruntime>=1.31"))
    if len(machine.runtime_packages) > 1:
        return Need(name, _BOTH, _overwritten(machine), _replace_runtime(machine, "onnxruntime>=1.31"))
    return Need(name, _BOTH)


def _gpu(sku: Sku, machine: Machine, stages: tuple[Stage, ...]) -> Need:
    """TensorRT builds on the GPU that it builds for; ONNX Runtime's engines are judged on a CPU."""
    matches = [match_gpu(gpu, {sku.name: sku}) for gpu in machine.gpus]
    if any(match.sku for match in matches):
        return Need("GPU", stages)
    found = ", ".join(gpu.name for gpu in machine.gpus) or "none"
    return Need("GPU", stages, f"this machine's GPU is {found}: use a machine with {sku.title or sku.name}")


def _driver(machine: Machine, stages: tuple[Stage, ...]) -> Need:
    name, command = "NVIDIA driver", _DRIVERS.get(machine.distribution)
    found = machine.driver
    major = (found.found or "").partition(".")[0]
    if not found.ok:
        problem = found.problem
    elif machine.board is None and major.isdigit() and int(major) < OLDEST_DRIVER:
        problem = f"found {found.found}, but CUDA 13 needs {OLDEST_DRIVER} or newer"
    else:
        return Need(name, stages)
    if command and command.endswith(_FROM_NVIDIA):
        problem += "; the package is in NVIDIA's CUDA repository for this system, which must be set up first"
    return Need(name, stages, problem, _root(machine, command) if command else None)


def _cuda(machine: Machine) -> list[Need]:
    """ONNX Runtime, its CUDA provider, which only running needs, and our library of operators for it."""
    stages: tuple[Stage, ...] = ("run",) if machine.runtime.ok else _BOTH
    runtime, wanted = "ONNX Runtime with CUDA", "onnxruntime-gpu[cuda,cudnn]>=1.31"
    if len(machine.runtime_packages) > 1:
        provider = Need(runtime, _BOTH, _overwritten(machine), _replace_runtime(machine, wanted))
    elif "CUDAExecutionProvider" not in machine.providers:
        offers = ", ".join(machine.providers) or machine.runtime.problem
        problem = f"the installed one has no CUDAExecutionProvider ({offers})"
        provider = Need(runtime, stages, problem, _replace_runtime(machine, wanted))
    elif not machine.cuda_provider.ok:
        problem = f"its CUDA provider does not load: {machine.cuda_provider.problem}"
        provider = Need(runtime, stages, problem, f"{_pip(machine, wanted)} && export {_libraries(machine)}")
    else:
        provider = Need(runtime, stages)
    return [provider, *_cuda_compiler(machine)]


def _cuda_compiler(machine: Machine) -> list[Need]:
    if machine.cuda_plugins.ok:
        return [Need("CUDA plugins", ("build",))]
    nvcc = Need("CUDA compiler", ("build",))
    if not machine.nvcc.ok:
        command = f"{_pip(machine, _NVCC, quoted=True)} && export {_nvcc_path(machine)}"
        nvcc = Need("CUDA compiler", ("build",), f"{machine.nvcc.problem}; plugins are compiled with it", command)
    return [nvcc, _compiler(machine)]


def _nvcc_path(machine: Machine) -> str:
    return f"NVCC=$({machine.python} -c '{_IN_NVIDIA.format('next', 'p', '*/bin/nvcc')}')"


def _libraries(machine: Machine) -> str:
    """ONNX Runtime finds pip's CUDA libraries only where the loader looks."""
    find = _IN_NVIDIA.format('":".join', "str(p)", "**/lib")
    return f"LD_LIBRARY_PATH=$({machine.python} -c '{find}')"


def _tensorrt(sku: Sku, machine: Machine) -> list[Need]:
    if machine.tensorrt.ok:
        return [Need("TensorRT", _BOTH)]
    if sku.generation == "Ampere" and sku.capability == (8, 7):  # TensorRT for Jetson comes with JetPack only
        command = _root(machine, "apt-get install -y tensorrt python3-libnvinfer")
    else:
        command = _pip(machine, "tensorrt>=10.13")
    return [Need("TensorRT", _BOTH, machine.tensorrt.problem, command)]


def _compiler(machine: Machine) -> Need:
    if machine.compiler.ok:
        return Need("C++ compiler", ("build",))
    package, install = _CXX.get(machine.distribution), _INSTALL.get(machine.distribution)
    command = _root(machine, install.format(package)) if package and install else None
    return Need("C++ compiler", ("build",), machine.compiler.problem, command)


def _optional(sku: Sku, machine: Machine) -> list[Need]:
    """Not every model needs these."""
    needs = []
    if sku.is_cpu and not machine.cpu_plugins.ok:
        compiler = _compiler(machine)
        needs.append(Need("C++ compiler, for decoders", ("build",), compiler.problem, compiler.command))
    missing = [name for name in ("torch", "onnxscript") if name not in machine.packages]
    problem = f"{', '.join(missing)} not installed" if missing else ""
    command = _pip(machine, *missing) if missing else None
    needs.append(Need("torch, for all sources but .onnx", ("build",), problem, command))
    needs.append(Need("attention plugin, for decoders", _BOTH, attention_problem(sku) or ""))
    return needs


def _overwritten(machine: Machine) -> str:
    return f"{' and '.join(machine.runtime_packages)} are both installed and overwrite each other's files"


def _replace_runtime(machine: Machine, wanted: str) -> str:
    names = [package.partition(" ")[0] for package in machine.runtime_packages]
    remove = f"{machine.python} -m pip uninstall -y {' '.join(names)} && " if names else ""
    return remove + _pip(machine, wanted)


def _pip(machine: Machine, *packages: str, quoted: bool = False) -> str:
    words = (
        packages
        if quoted
        else tuple(f"'{package}'" if set(package) & set("<>[]*") else package for package in packages)
    )
    return f"{machine.python} -m pip install {' '.join(words)}"


def _root(machine: Machine, command: str) -> str:
    return command if machine.is_root else f"sudo {command}"
