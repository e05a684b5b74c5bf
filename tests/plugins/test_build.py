"""Compiling the CPU library: the cache, concurrent builders, and what goes wrong."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugins import build
from plugins.errors import KilnError

ROOT = Path(build.__file__).parents[1]
FAST = ("-std=c++17", "-fPIC", "-w", "-O0")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def one_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A plugin folder with one small source, so that a build takes no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cc").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "_ROOT", folder)
    monkeypatch.setattr(build, "_SOURCES", ("answer.cc",))
    monkeypatch.setattr(build, "_KERNELS", {})
    monkeypatch.setattr(build, "_isas", dict)
    return folder / "answer.cc"


def test_second_call_compiles_nothing(empty_cache: Path, one_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.cpu_library()
    assert library.is_relative_to(empty_cache / "kiln")
    assert sorted(path.name for path in library.parent.iterdir()) == ["libkiln_cpu.so", "lock"]
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.cpu_library() == library


def test_another_source_or_header_is_another_library(empty_cache: Path, one_source: Path) -> None:
    first = build.cpu_library()
    (one_source.parent / "new.h").write_text("// a header\n")
    second = build.cpu_library()
    one_source.write_text(one_source.read_text().replace("42", "43"))
    third = build.cpu_library()
    assert len({first, second, third}) == 3
    assert all(path.exists() for path in (first, second, third))


def test_a_library_is_never_seen_half_written(
    empty_cache: Path, one_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder that dies leaves nothing under the final name, and the next one succeeds."""
    link = build._run_all

    def dies_after_linking(commands: list[list[str]]) -> None:
        link(commands)
        if "-shared" in commands[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(build, "_run_all", dies_after_linking)
    with pytest.raises(KeyboardInterrupt):
        build.cpu_library()
    assert not list(empty_cache.rglob("*.so"))
    monkeypatch.setattr(build, "_run_all", link)
    assert build.cpu_library().exists()


def test_concurrent_builders_agree_and_compile_once(empty_cache: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = tmp_path / "counting-c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {calls}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    code = (
        "from plugins import build\n"
        f"build._RELEASE = build._Variant('libkiln_cpu.so', {FAST!r})\n"
        "build._SOURCES = ('measure.cc',)\n"
        "build._isas = dict\n"
        "print(build.cpu_library())"
    )
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(ROOT)}
    builders = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = {builder.communicate()[0] for builder in builders}
    assert all(builder.returncode == 0 for builder in builders)
    assert len(printed) == 1
    assert Path(printed.pop().strip()).exists()
    assert len(calls.read_text().split()) == 2, "one compilation and one link"


def test_missing_compiler_names_the_packages(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilerMissingError, match=r"g\+\+ \(Debian, Ubuntu\), gcc-c\+\+ \(Fedora"):
        build.cpu_library()
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(build.CompilerMissingError, match="found CXX='no-such-compiler'"):
        build.cpu_library()


def test_failing_compiler_shows_its_last_lines(empty_cache: Path, one_source: Path) -> None:
    one_source.write_text("int answer() { return no_such_name; }\n")
    with pytest.raises(KilnError, match=r"no_such_name.* was not declared"):
        build.cpu_library()
    assert not list(empty_cache.rglob("*.so"))


def test_cache_that_cannot_be_written_says_so(empty_cache: Path, one_source: Path) -> None:
    empty_cache.write_text("a file where the folder should be")
    with pytest.raises(KilnError, match=r"cannot create the cache folder .*; set XDG_CACHE_HOME"):
        build.cpu_library()


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / ".cache" / "kiln"


def test_module_prints_the_path() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "plugins.build"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(build.cpu_library())


def test_every_source_is_package_data() -> None:
    """What the build reads must be in the wheel: the patterns of pyproject.toml cover all of it."""
    sources = {*build._KERNELS, *build._SOURCES}
    found = {path.relative_to(build._ROOT).as_posix() for path in build._ROOT.rglob("*.cc") if build._is_ours(path)}
    assert found == sources


GLIBC = tuple(int(part) for part in (platform.libc_ver()[1] or "0").split("."))


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.skipif(GLIBC >= (2, 38), reason="headers of glibc 2.38 and newer bind standard functions to that version")
def test_library_runs_on_older_systems() -> None:
    """It travels inside bundles: it must not ask for the C library of the machine that built it."""
    symbols = subprocess.run(
        ["objdump", "-T", str(build.cpu_library())], capture_output=True, text=True, check=True
    ).stdout
    versions = {
        tuple(map(int, word.split("_")[1].rstrip(")").split("."))) for word in symbols.split() if "GLIBC_2" in word
    }
    assert max(versions) <= (2, 34)
