"""Compiles the CUDA plugin library with nvcc, once per content, for the architectures that Kiln knows.

The library holds machine code for each of them and its own copy of the CUDA runtime, so a machine that runs it needs
the driver and neither nvcc nor a toolkit. `python -m plugins.cuda_build` builds it and prints its path;
`python -m plugins.cuda_build sm_90` for one architecture only, which takes a seventh of the time.

Knows nothing of what the sources do.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plugins.compiling import ROOT, cached_library, content_key, existing_library, run_all
from plugins.errors import KilnError

ARCHITECTURES: dict[str, str] = {
    "sm_80": "80",
    "sm_86": "86",
    "sm_87": "87",
    "sm_89": "89",
    "sm_90": "90a",
    "sm_100": "100",
    "sm_120": "120",
}
"""What each architecture is compiled as: on sm_90 the kernels use instructions that only its variant a has."""

SOURCES = (
    *("paged_attention/cuda_attention.cu", "paged_attention/cuda_decode.cu", "paged_attention/cuda_prefill.cu"),
    *("paged_attention/cuda_hopper.cu", "paged_attention/cuda_ort.cc"),
    *("dense/cuda.cu", "dense/cuda_hopper.cu", "dense/cuda_portable.cu", "dense/cuda_library.cu", "dense/cuda_ort.cc"),
    "dense/cuda_algorithms.cc",
    *("quant_matmul/cuda.cu", "quant_matmul/cuda_hopper.cu", "quant_matmul/cuda_portable.cu"),
    *("quant_matmul/cuda_rows.cu", "quant_matmul/cuda_library.cu", "quant_matmul/cuda_ort.cc"),
    *("elementwise/cuda.cu", "elementwise/cuda_ort.cc"),
    *("sampling/cuda.cu", "sampling/cuda_ort.cc"),
    *("cuda_register.cc",),
)
ONLY_ON = {f"{folder}/cuda_hopper.cu": ("sm_90",) for folder in ("paged_attention", "dense", "quant_matmul")}
"""Sources with nothing in them for other architectures."""

_LIBRARY = "libkiln_cuda.so"
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-lineinfo")
_INSTALL = "install the CUDA toolkit 12.8 or later (Debian, Ubuntu: cuda-nvcc-13-0 and cuda-cudart-dev-13-0)"


class NvccMissingError(KilnError):
    """No nvcc on this machine; the message names what to install."""


def cuda_library(architectures: Sequence[str] = tuple(ARCHITECTURES)) -> Path:
    """Path of the compiled CUDA plugin library; compiles it if this content was never compiled here.

    Raises `NvccMissingError` without nvcc and `KilnError` for an unknown architecture or when compilation fails.
    """
    nvcc = find_nvcc()
    chosen = _known(architectures)
    return cached_library(_key(nvcc, chosen), _LIBRARY, lambda library: _compile(nvcc, chosen, library))


def current_cuda_library(architectures: Sequence[str] = tuple(ARCHITECTURES)) -> Path | None:
    """Path of the library if this content was compiled here before; compiles nothing. Raises `NvccMissingError`."""
    return existing_library(_key(find_nvcc(), _known(architectures)), _LIBRARY)


def compile_to_ptx(source: str, architecture: str, target: Path) -> None:
    """Compiles one of `SOURCES` as far as the assembler's input: what a compiler can say without a GPU.

    Not optimised: that takes six times as long, and says nothing more.
    """
    _known([architecture])
    arch = f"compute_{ARCHITECTURES[architecture]}"
    flags = (*_FLAGS, "-Xcicc", "-O0", "-ptx", f"-arch={arch}")
    run_all([[*find_nvcc(), *flags, str(ROOT / source), "-o", str(target)]], "CUDA compiler")


def find_nvcc() -> list[str]:
    """Command of the CUDA compiler: $NVCC if set, else nvcc on the path or in /usr/local/cuda."""
    if command := shlex.split(os.environ.get("NVCC", "")):
        if shutil.which(command[0]):
            return command
        raise NvccMissingError(
            f"NVCC names a compiler that is not there: found NVCC={command[0]!r}; correct or unset it"
        )
    for name in ("nvcc", "/usr/local/cuda/bin/nvcc"):
        if path := shutil.which(name):
            return [path]
    raise NvccMissingError(
        f"no CUDA compiler found (looked for nvcc on the path and in /usr/local/cuda/bin, NVCC is not set); {_INSTALL}"
    )


def _key(nvcc: list[str], architectures: tuple[str, ...]) -> str:
    version = subprocess.run([*nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [path for path in ROOT.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}]
    return content_key((nvcc[1:], version, architectures, SOURCES, ONLY_ON, _FLAGS), ROOT, sources)


def _known(architectures: Sequence[str]) -> tuple[str, ...]:
    if unknown := [one for one in architectures if one not in ARCHITECTURES]:
        raise KilnError(f"unknown CUDA architecture: found {unknown[0]!r}, expected some of {', '.join(ARCHITECTURES)}")
    if not architectures:
        raise KilnError(f"no CUDA architecture chosen: expected some of {', '.join(ARCHITECTURES)}")
    return tuple(one for one in ARCHITECTURES if one in architectures)


def _compile(nvcc: list[str], architectures: tuple[str, ...], library: Path) -> None:
    """Compiles next to `library` and renames into place, so that a half-written library is never seen."""
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        folder = Path(temporary)
        objects = [str(folder / f"{number}.o") for number in range(len(SOURCES))]
        commands = []
        for source, target in zip(SOURCES, objects, strict=True):
            numbers = [ARCHITECTURES[one] for one in architectures if one in ONLY_ON.get(source, architectures)]
            # Without one of its architectures a source still has its host code.
            codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers or [ARCHITECTURES[architectures[0]]]]
            commands.append([*nvcc, *_FLAGS, "--split-compile=0", *codes, "-c", str(ROOT / source), "-o", target])
        run_all(commands, "CUDA compiler")
        linked = folder / library.name
        run_all([[*nvcc, "-shared", "-cudart", "static", *objects, "-o", str(linked)]], "CUDA compiler")
        linked.replace(library)


if __name__ == "__main__":
    print(cuda_library(sys.argv[1:] or tuple(ARCHITECTURES)))
