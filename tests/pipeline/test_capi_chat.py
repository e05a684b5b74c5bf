"""The C example asks the real model, from outside the virtual environment and with an empty environment."""

import subprocess
from pathlib import Path

from engines.bundle import EngineBundle
from engines.capi.build import HEADER, build
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams

QUESTION = 'What is the capital of France?\nSay "Paris".'


def test_the_c_example_gives_the_runtimes_answer(smollm2_bundle: EngineBundle, tmp_path: Path) -> None:
    built = build(tmp_path)
    flags = [f"-I{built.header.parent}", f"-L{built.library.parent}", "-lkiln", f"-Wl,-rpath,{built.library.parent}"]
    program = tmp_path / "chat"
    subprocess.run(["cc", "-std=c99", HEADER.parent / "examples/chat.c", *flags, "-o", program], check=True)
    command = ["/usr/bin/env", "-i", program, smollm2_bundle.path, QUESTION, "30"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    with Engine.open(smollm2_bundle.path) as engine:
        prompt = tuple(engine.tokenizer.chat_prompt([{"role": "user", "content": QUESTION}]))
        stream = engine.submit(Request(prompt, SamplingParams(max_tokens=30)))
        assert done.stdout == stream.result(300).text + "\n"
    assert "Paris" in done.stdout
