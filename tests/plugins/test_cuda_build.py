"""Compiling the CUDA library: every source for every architecture as far as a machine without a GPU can, and errors."""

import shutil
from pathlib import Path

import pytest

from plugins import compiling, cuda_build
from plugins.errors import KilnError

ROOT = compiling.ROOT
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
KERNELS = [source for source in cuda_build.SOURCES if source.endswith(".cu")]


@pytest.mark.slow
@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.parametrize("architecture", cuda_build.ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_compiles_to_ptx(source: str, architecture: str, tmp_path: Path) -> None:
    cuda_build.compile_to_ptx(source, architecture, tmp_path / "kernels.ptx")
    ptx = (tmp_path / "kernels.ptx").read_text()
    assert f".target sm_{cuda_build.ARCHITECTURES[architecture]}" in ptx


def test_every_source_is_in_the_list() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.cu")}
    found |= {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("cuda*.cc")}
    alone = "paged_attention/tensorrt_kernels.cu"  # no part of the library: tests/engines/tensorrt compile it
    assert found == {*cuda_build.SOURCES, alone}


def test_missing_nvcc_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("NVCC", raising=False)
    with pytest.raises(cuda_build.NvccMissingError, match="install the CUDA toolkit"):
        cuda_build.cuda_library()
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(cuda_build.NvccMissingError, match="found NVCC='no-such-nvcc'"):
        cuda_build.cuda_library()


def test_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: ["nvcc"])
    with pytest.raises(KilnError, match=r"found 'sm_70', expected some of sm_80, .*sm_120"):
        cuda_build.cuda_library(["sm_90", "sm_70"])
    with pytest.raises(KilnError, match="no CUDA architecture chosen"):
        cuda_build.cuda_library([])


def test_second_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: ["true"])
    calls: list[tuple[str, ...]] = []

    def compile_nothing(nvcc: list[str], architectures: tuple[str, ...], library: Path) -> None:
        calls.append(architectures)
        library.touch()

    monkeypatch.setattr(cuda_build, "_compile", compile_nothing)
    first = cuda_build.cuda_library(["sm_90"])
    assert cuda_build.cuda_library(["sm_90"]) == first
    assert cuda_build.cuda_library(["sm_120", "sm_90"]) != first
    assert calls == [("sm_90",), ("sm_90", "sm_120")]
