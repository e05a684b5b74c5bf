"""README's commands and its Python example run as they are written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    """What each command of "Use it" printed, run one after the other in one folder."""
    return {command: run(command, folder).stdout for command in blocks("sh")[1].strip().splitlines()}


def test_make_demo_runs_the_readmes_main_commands() -> None:
    """`make demo` installs, builds, answers and compares; here only what it would run is checked, not run twice."""
    plan = run("make -n demo", ROOT).stdout
    for part in ("build-engine smollm2", "kiln run bundles/smollm2", "kiln compare smollm2 bundles/smollm2"):
        assert part in plan
    assert "make demo" in blocks("sh")[0]


def test_commands(folder: Path, outputs: dict[str, str]) -> None:
    answers = [text for command, text in outputs.items() if "capital of France" in command]
    assert answers == ["The capital of France is Paris.\n"]
    assert (folder / "reports" / "smollm2.html").stat().st_size > 10_000


def test_python_example(folder: Path, outputs: dict[str, str]) -> None:
    (example,) = blocks("python")
    result = run(f"{shlex.quote(sys.executable)} -c {shlex.quote(example)}", folder)
    assert result.stdout.startswith("The capital of France is Paris.\n")
    assert len(result.stdout.splitlines()) >= 3


def test_paths_exist() -> None:
    for path in re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(r"`((?:plugins|docs|engines)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
