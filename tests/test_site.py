"""The site builds without a warning, and its generated references hold everything there is."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from document_capi import HEADER, types_from_header

from pipeline.cli import kiln_group

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def commands(group: click.Group, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{path} {name}"
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def test_every_page_is_there_and_every_command_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "cli" / "index.html").read_text()
    for path in ("build-engine", *commands(kiln_group, "kiln")):
        assert f'id="{path.replace(" ", "-")}"' in page, path
    assert "Sentinel" not in page, "mkdocs-click shows click's internals"
    assert (site / "source" / "engines" / "capi" / "kiln.h").read_bytes() == HEADER.read_bytes()
    assert "Kiln compiles a trained model" in (site / "index.html").read_text()


def test_the_c_reference_holds_what_a_c_parser_finds() -> None:
    cffi = pytest.importorskip("cffi")
    from engines.capi.build import declarations

    ffi = cffi.FFI()
    ffi.cdef(declarations())
    found = {one.name: one for one in types_from_header(HEADER.read_text())}
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind == "enum":
            names = [member.code.split(" = ")[0] for member in found[name].members]
            assert set(names) == set(kind.elements.values())
        elif kind.kind == "struct" and kind.fields:
            assert [member.name for member in found[name].members] == [field for field, _ in kind.fields]
    assert all(member.text for member in found["kiln_api"].members if "(" in member.code)
    assert all(one.text for one in found["kiln_code"].members[1:] if one.name != "KILN_OUT_OF_MEMORY")
