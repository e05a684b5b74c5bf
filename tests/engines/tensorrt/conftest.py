"""A TensorRT that builds without a GPU, for tests only: its Python module over the libraries of TensorRT-RTX from PyPI.

Both packages go into a folder of the user's cache, once; users install the real `tensorrt`. The two products' binary
interfaces differ in places, so everything runs in child processes and only networks of standard operators are built.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

BINDINGS, OLD_BINDINGS = "tensorrt-cu13-bindings==11.4.0.106", "tensorrt-cu13-bindings==10.16.1.11"
LIBRARIES = "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0"
CACHE = Path.home() / ".cache" / "kiln-tests"
_RTX = "onnxruntime_ep_nv_tensorrt_rtx"
_STUB = "int initLibNvInferPlugins(void* logger, const char* scope) { return 1; }\n"
_MODULE = "import sys, tensorrt_bindings\nsys.modules[__name__] = tensorrt_bindings\n"


@dataclass(frozen=True)
class Harness:
    """`environment` in which `import tensorrt` works; `rtx` has TensorRT-RTX's files."""

    environment: dict[str, str]
    rtx: Path

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Python in that environment."""
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)


def _installed(requirement: str) -> Path:
    """The folder that holds a package, downloaded once. Skips where that fails."""
    folder = CACHE / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        pytest.skip(f"{requirement} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    try:
        partial.rename(folder)
    except OSError:  # another test run was faster
        shutil.rmtree(partial)
    return folder


def _harness(bindings: str, folder: Path) -> Harness:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the packages from PyPI are for Linux on x86-64")
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which makes the empty plugin library, is not installed: apt install gcc")
    CACHE.mkdir(parents=True, exist_ok=True)
    module, libraries = _installed(bindings), _installed(LIBRARIES) / _RTX
    major = bindings.split("==")[1].split(".")[0]
    engine, parser = (
        next(libraries.glob("libtensorrt_rtx.so.*")),
        next(libraries.glob("libtensorrt_onnxparser_rtx.so.*")),
    )
    (folder / f"libnvinfer.so.{major}").symlink_to(engine)
    (folder / "libtensorrt_rtx.so.1").symlink_to(engine)
    (folder / f"libnvonnxparser.so.{major}").symlink_to(parser)
    (folder / "stub.c").write_text(_STUB)
    stub = folder / f"libnvinfer_plugin.so.{major}"
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "stub.c"), "-o", str(stub)], check=True)
    (folder / "tensorrt.py").write_text(_MODULE)
    path = os.pathsep.join([str(folder), str(module), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": path}
    harness = Harness(environment, libraries)
    tried = harness.run("-c", "import tensorrt; print(tensorrt.__version__)")
    if tried.returncode != 0:
        pytest.skip(f"{bindings} cannot be imported: {tried.stderr.strip().splitlines()[-1:]}")
    return harness


@pytest.fixture(scope="session")
def tensorrt_11(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return _harness(BINDINGS, tmp_path_factory.mktemp("tensorrt-11"))


@pytest.fixture(scope="session")
def tensorrt_10(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return _harness(OLD_BINDINGS, tmp_path_factory.mktemp("tensorrt-10"))


@pytest.fixture
def builder(tensorrt_11: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Child processes of a test find TensorRT 11."""
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("the real tensorrt is installed: run pytest -m tensorrt")
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, tensorrt_11.environment[name])
    return tensorrt_11
