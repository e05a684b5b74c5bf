"""A foreign package with one of our generic names is noticed before anything runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln_launcher import PACKAGES, check_packages

PROGRAMS = {"build-engine": "build_engine", "kiln": "kiln"}


def run(code: str, *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)


def test_ours_resolve() -> None:
    check_packages()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_shadowed_package_is_named_with_its_path(tmp_path: Path, package: str, program: str) -> None:
    foreign = tmp_path / package / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("raise SystemError('the foreign package was imported')\n")
    result = run(f"import kiln_launcher; kiln_launcher.{PROGRAMS[program]}()", cwd=tmp_path)
    assert result.returncode == 2
    assert str(foreign.resolve()) in result.stderr
    assert package in result.stderr
    assert "PYTHONSAFEPATH" in result.stderr
    assert "Traceback" not in result.stderr


def test_engines_checks_its_siblings(tmp_path: Path) -> None:
    foreign = tmp_path / "passes" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("")
    result = run("import engines", cwd=tmp_path)
    assert result.returncode == 1
    assert f"would be imported from {foreign.resolve()}" in result.stderr


def test_the_named_way_out_works(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "__init__.py").write_text("")
    result = run("import engines", cwd=tmp_path, PYTHONSAFEPATH="1")
    assert result.returncode == 0, result.stderr
