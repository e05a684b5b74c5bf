"""README's commands and its Python example run as they are written."""

import json
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
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(cwd / "state")}
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


def test_operating_commands(folder: Path, outputs: dict[str, str]) -> None:
    operated = {command: run(command, folder).stdout for command in blocks("sh")[3].strip().splitlines()}
    assert (folder / "reports" / "profile.html").stat().st_size > 10_000
    assert "smollm2" in operated["kiln ledger list"]
    (listed,) = (text for command, text in operated.items() if "registry list" in command)
    assert "minilm" in listed


def test_the_server_answers_its_commands(folder: Path, outputs: dict[str, str]) -> None:
    """The first command runs beside the others, from when it prints its address until it is asked to end."""
    serve, chat, embeddings, load, metrics = blocks("sh")[2].strip().splitlines()
    with subprocess.Popen(
        [str(BIN / "kiln"), *shlex.split(serve)[1:]], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "http://127.0.0.1:8321\n"
            answer = json.loads(run(chat, folder).stdout)
            assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
            assert [len(vector["embedding"]) for vector in json.loads(run(embeddings, folder).stdout)["data"]] == [
                384
            ] * 2
            assert "first token" in run(load, folder).stdout
            assert 'kiln_requests_total{model="smollm2",outcome="stop"} 1.0' in run(metrics, folder).stdout
        finally:
            server.terminate()
        assert server.wait(60) == 0


def test_python_example(folder: Path, outputs: dict[str, str]) -> None:
    (example,) = blocks("python")
    result = run(f"{shlex.quote(sys.executable)} -c {shlex.quote(example)}", folder)
    assert result.stdout.startswith("The capital of France is Paris.\n")
    assert len(result.stdout.splitlines()) >= 3


def test_paths_exist() -> None:
    for path in re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(r"`((?:plugins|docs|engines)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
