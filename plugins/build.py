"""Compiles the CPU plugin library with the machine's C++ compiler, once per content.

The library lies in the user's cache folder under a name made of a SHA-256 over sources, flags and compiler
version, so an existing file is always the right one. `python -m plugins.build` builds it and prints its path.

Knows nothing of what the sources do, except that the kernels are compiled once per instruction set.
"""

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from plugins.compiling import ROOT as _ROOT
from plugins.compiling import cache_folder as cache_folder
from plugins.compiling import cached_library, content_key, existing_library
from plugins.compiling import run_all as _run_all
from plugins.errors import KilnError

_BASIC = ("plain", "avx2", "avx512")
_KERNELS: dict[str, tuple[str, ...]] = {
    "paged_attention/kernels.cc": (*_BASIC, "avx512bf16"),
    "elementwise/kernels.cc": _BASIC,
    "quant_matmul/kernels.cc": (*_BASIC, "avx512vnni"),
}
"""Kernels, and the instruction sets that each is compiled for."""
_SOURCES = (
    *("paged_attention/cpu.cc", "paged_attention/check.cc", "paged_attention/ort.cc"),
    *("elementwise/cpu.cc", "elementwise/ort.cc"),
    *("quant_matmul/cpu.cc", "quant_matmul/ort.cc"),
    *("sampling/cpu.cc", "sampling/ort.cc"),
    *("isa.cc", "register.cc", "measure.cc"),
)
# Instruction sets by machine; must agree with the dispatch in isa.h. Never -march=native: the
# library travels to other machines inside bundles.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_ISAS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "plain": (),
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512vnni": (*_AVX512, "-mavx512vnni"),
        "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    }
}
_PLAIN_ONLY: dict[str, tuple[str, ...]] = {"plain": ()}
_PACKAGES = "g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL, openSUSE), gcc (Arch), build-base (Alpine)"


class CompilerMissingError(KilnError):
    """No C++ compiler on this machine; the message names the package to install."""


@dataclass(frozen=True)
class _Variant:
    """How a library is compiled and linked, apart from its sources."""

    file_name: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ("-shared", "-pthread")


# GCC's intrinsics headers trip -Wmaybe-uninitialized; -Wpsabi warns of vector arguments, and all of ours are inlined.
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-psabi")
_RELEASE = _Variant("libkiln_cpu.so", (*_COMMON, "-O3"))
_SANITIZED = _Variant(
    "libkiln_cpu_asan.so",
    (*_COMMON, "-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"),
    ("-shared", "-pthread", "-fsanitize=address"),
)


def cpu_library() -> Path:
    """Path of the compiled CPU plugin library; compiles it if this content was never compiled here.

    Raises `CompilerMissingError` without a C++ compiler and `KilnError` when compilation fails. Safe to call from
    several processes at once.
    """
    return _library(_RELEASE)


def current_cpu_library() -> Path | None:
    """Path of the library if this content was compiled here before; compiles nothing. Raises `CompilerMissingError`."""
    return existing_library(_key(_RELEASE, find_compiler()), _RELEASE.file_name)


def sanitized_cpu_library() -> Path:
    """Like `cpu_library`, compiled with AddressSanitizer: the process must preload the compiler's libasan."""
    return _library(_SANITIZED)


def find_compiler() -> list[str]:
    """Command of the C++ compiler: $CXX if set, as every build tool does, else g++, clang++ or c++ on the path."""
    if command := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(command[0]):
            return command
        raise CompilerMissingError(
            f"CXX names a compiler that is not there: found CXX={command[0]!r}; correct or unset it"
        )
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    raise CompilerMissingError(
        f"no C++ compiler found (looked for g++, clang++ and c++ on the path, CXX is not set); install one: {_PACKAGES}"
    )


def _library(variant: _Variant) -> Path:
    compiler = find_compiler()
    return cached_library(
        _key(variant, compiler), variant.file_name, lambda library: _compile(variant, compiler, library)
    )


def _isas() -> dict[str, tuple[str, ...]]:
    return _ISAS.get(platform.machine(), _PLAIN_ONLY)


def _key(variant: _Variant, compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    facts = (compiler[1:], version.stdout, platform.machine(), variant, sorted(_isas().items()), _KERNELS)
    return content_key(facts, _ROOT, (path for path in _ROOT.rglob("*") if _is_ours(path)))


def _is_ours(path: Path) -> bool:
    """Not what only the CUDA library is made of: changing that must not compile this one again."""
    return path.suffix in {".h", ".cc"} and not path.name.startswith("cuda")


def _compile(variant: _Variant, compiler: list[str], library: Path) -> None:
    """Compiles next to `library` and renames into place, so that a half-written library is never seen."""
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        folder = Path(temporary)
        jobs: list[tuple[str, tuple[str, ...]]] = [(source, ()) for source in _SOURCES]
        jobs += [
            (source, (f"-DKILN_ISA={isa}", *flags))
            for source, wanted in _KERNELS.items()
            for isa, flags in _isas().items()
            if isa in wanted
        ]
        objects = [str(folder / f"{number}.o") for number in range(len(jobs))]
        commands = [
            [*compiler, *variant.compile_flags, *flags, "-c", str(_ROOT / source), "-o", target]
            for (source, flags), target in zip(jobs, objects, strict=True)
        ]
        _run_all(commands[::-1])  # kernels first: they take longest
        linked = folder / library.name
        _run_all([[*compiler, *objects, *variant.link_flags, "-o", str(linked)]])
        linked.replace(library)


if __name__ == "__main__":
    print(cpu_library())
