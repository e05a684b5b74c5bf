"""`kiln capi build`, the examples compiled against what it makes, and what it says when something is missing."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.capi import build as capi_build
from engines.capi.build import HEADER, build
from engines.capi.client import Library
from pipeline.cli_capi import capi_group
from plugins.errors import KilnError

EXAMPLES = HEADER.parent / "examples"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def pkg_config(folder: Path) -> list[str]:
    """What a user's build gets for a folder that `kiln capi build` made."""
    command = [
        "/usr/bin/env",
        f"PKG_CONFIG_PATH={folder / 'lib/pkgconfig'}",
        "pkg-config",
        "--cflags",
        "--libs",
        "kiln",
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def examples(capi, tmp_path_factory) -> Path:
    """Both examples, compiled as their first lines say, against the folder after it was moved."""
    folder = tmp_path_factory.mktemp("moved") / "kiln"
    shutil.copytree(capi, folder)
    flags = [*pkg_config(folder), f"-Wl,-rpath,{folder / 'lib'}"]
    compilers = {"chat.c": ["cc", "-std=c99"], "parallel.cc": ["c++", "-std=c++17", "-pthread"]}
    for name, compiler in compilers.items():
        source = EXAMPLES / name
        subprocess.run([*compiler, *STRICT, source, *flags, "-o", folder / source.stem], check=True)
    return folder


def run(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Outside the virtual environment, with an empty environment."""
    command = ["/usr/bin/env", "-i", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)


def test_cpp_serves_8_threads_with_cancellations(examples, tiny_bundle):
    done = run(examples / "parallel", tiny_bundle.path, "8", "12", "HELLO", sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    finished, cancelled = (int(part.split()[0]) for part in done.stdout.split(",")[:2])
    assert finished + cancelled == 8 * 12
    assert finished >= 8 * 8
    assert cancelled > 0
    assert done.stdout.endswith("0 different, 0 failed\n")


def test_examples_print_what_is_wrong(examples, bare_bundle, tmp_path):
    wrong = {
        ("chat", bare_bundle.path, "hello"): "error 1: tiny has no tokenizer",
        ("chat", tmp_path, "hello"): "error 3: ",
        ("chat", bare_bundle.path, "hello", "3", "/nowhere"): "error 7: /nowhere is no program",
        ("parallel", tmp_path): "error: ",
    }
    for (program, *arguments), message in wrong.items():
        done = run(examples / program, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1
    assert run(examples / "chat").returncode == 2


def test_the_library_exports_one_function(capi):
    command = ["nm", "-D", "--defined-only", "--format=posix", capi / "lib/libkiln.so"]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in symbols] == ["kiln_get_api"]


def test_command(tmp_path):
    result = CliRunner().invoke(capi_group, ["build", "--out", str(tmp_path)], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert [Path(line).relative_to(tmp_path).as_posix() for line in lines[:3]] == [
        *("include/kiln.h", "lib/libkiln.so", "lib/pkgconfig/kiln.pc"),
    ]
    assert Path(lines[0]).read_bytes() == HEADER.read_bytes()
    assert f"Version: {version('kiln-engine')}\n" in Path(lines[2]).read_text()
    assert sorted(path.name for path in (tmp_path / "lib").iterdir()) == ["libkiln.so", "pkgconfig"]
    subprocess.run("\n".join(lines[5:]), shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "chat").is_file()


def test_a_build_in_place_of_an_older_one(tmp_path):
    first = build(tmp_path)
    before = first.library.stat().st_ino
    assert build(tmp_path) == first
    assert first.library.stat().st_ino != before, "programs that run keep the file that they have"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("cffi", r"cffi is not installed .*kiln-engine\[capi\]"),
        ("compiler", "no C\\+\\+ compiler found"),
        ("headers", r"found no Python.h in /nowhere; install them: python3\.\d+-dev \(Debian"),
        ("shared library", r"looked for /nowhere/libpython3.*; install libpython3\.\d+-dev"),
        ("shared build", r"is a static Python .*cannot be embedded; install Kiln into an environment of a shared one"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, missing, message):
    real = sysconfig.get_config_var
    if missing == "cffi":
        monkeypatch.setitem(sys.modules, "cffi", None)
    elif missing == "compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
    elif missing == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    else:
        changed = {"LIBDIR": "/nowhere", "Py_ENABLE_SHARED": int(missing == "shared library")}
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: changed.get(name, real(name)))
        monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    with pytest.raises(KilnError, match=message):
        build(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_failed_compilation_shows_what_the_compiler_said(monkeypatch, tmp_path):
    monkeypatch.setattr(capi_build, "_FLAGS", (*capi_build._FLAGS, "-include", "no_such_header.h"))
    with pytest.raises(KilnError, match=r"(?s)the compiler failed; .*no_such_header"):
        build(tmp_path)
    assert not list((tmp_path / "lib").glob("*.so"))


def test_paths_with_any_characters_become_c_strings():
    assert capi_build._c_string('/a "b"\\c/é') == '"/a \\"b\\"\\\\c/\\303\\251"'


def test_a_library_that_is_none(tmp_path):
    (tmp_path / "text").write_text("no library")
    for path in (tmp_path / "text", tmp_path / "nowhere", "libm.so.6"):
        with pytest.raises(KilnError, match=r"cannot load .*build it with kiln capi build"):
            Library(path)
