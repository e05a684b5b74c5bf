"""The tutorials' commands and programs run as they are written, one page after the other, with tiny models.

Commands of ours run in this process, which saves starting an interpreter for each; whatever needs a shell runs in one.
The two pages that take longest are opt-in: what they show has tests of its own. `pytest -m tutorials` runs all.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from pipeline.cli import build_engine_command, kiln_group
from tests.pipeline.nightly_material import InProcess, save_conv

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
OURS: dict[str, click.Command] = {"kiln": kiln_group, "build-engine": build_engine_command}

pytestmark = [pytest.mark.slow, pytest.mark.tutorials]


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a model that chats, and a classifier."""
    folder = tmp_path_factory.mktemp("tutorials")
    shutil.copytree(make_llama(), folder / "my-model")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "my-model" / "chat_template.jinja").write_text(template)
    save_conv(folder / "classifier.onnx")
    return folder


def run_block(block: str, folder: Path) -> str:
    """Standard output; every command must end with code 0. Lines share nothing unless one exports a variable."""
    if "export " in block:
        return run_in_shell(block, folder)
    return "".join(run_line(line, folder) for line in block.strip().splitlines())


def run_line(line: str, folder: Path) -> str:
    name, *arguments = shlex.split(line)
    if name not in OURS or set(line) & set("|>$"):
        return run_in_shell(line, folder)
    result = CliRunner().invoke(OURS[name], arguments)
    assert result.exit_code == 0, (line, result.output, result.exception)
    return result.stdout


def run_in_shell(block: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "KILN": str(ROOT)}
    command = ["bash", "-euc", block]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(folder: Path) -> str:
    """The first tutorial, whose bundles the others use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return "".join(run_block(block, folder) for block in blocks("build", "sh"))


def test_engines_for_each_machine_type(built: str, folder: Path) -> None:
    assert "models/classifier/1" in built
    assert (folder / "reports" / "machines.html").stat().st_size > 10_000
    assert (folder / "bundles" / "fleet" / "cpu-avx512" / "manifest.json").is_file()


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> None:
    if "tutorials" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m tutorials")


def test_comparing_accuracy(wanted: None, built: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for block in blocks("accuracy", "sh"):
        run_block(block, folder)
    assert (folder / "reports" / "accuracy.html").stat().st_size > 10_000


def test_a_service_in_python(
    built: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for program in blocks("python", "python"):
        exec(compile(program, "docs/tutorials/python.md", "exec"), {"__name__": "__main__"})
    answers, outputs, info = capsys.readouterr().out.strip().rsplit("\n", 2)
    assert len(answers.splitlines()) == 2
    assert outputs == "{'y': (1, 10)}"
    assert info.startswith("my-model ")


def test_a_service_in_c_and_cpp_and_go(wanted: None, built: str, folder: Path) -> None:
    library, c, cpp, go = blocks("native", "sh")
    for block in (library, c, cpp):
        assert run_in_shell(block, folder).strip()
    if shutil.which("go") is None:
        pytest.skip("C and C++ passed; there is no Go compiler")
    (program,) = blocks("native", "go")
    (folder / "main.go").write_text(program)
    assert run_in_shell(go, folder).strip()


def test_the_nightly_job(built: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children are tests/pipeline/test_nightly_run.py's; here they run in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("pipeline.cli_nightly.LocalExecutor", InProcess)
    (config,) = blocks("nightly", "toml")
    (folder / "nightly.toml").write_text(config)
    printed = [run_block(block, folder) for block in blocks("nightly", "sh")]
    assert "promoted" in printed[1]
    assert "unchanged" in printed[3]
    assert "nightly" in printed[4]
    assert (folder / "pulled" / "classifier" / "engine.onnx").is_file()
