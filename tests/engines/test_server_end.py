"""How a server ends: what runs may finish, what comes is sent away, what takes too long is cancelled and told so."""

import asyncio
import json
import queue
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from engines.runtime.info import EngineInfo
from engines.runtime.request import TokenChunk
from engines.server.auth import KeyRing, require_safe
from engines.server.config import ServerConfig
from engines.server.serve import bind, server_for
from pipeline.cli_serve import serve_command
from plugins.errors import KilnError

KILN = (sys.executable, "-c", "from kiln_launcher import kiln; kiln()")
ASK = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}


def test_running_requests_finish_and_new_ones_are_sent_away(fake_engine, recorded_engine, served):
    engine = recorded_engine(fake_engine())
    backend = engine.engine.backend
    server = served({"fake": engine})
    backend.gate.clear()
    with (
        httpx.Client(base_url=server.url) as http,
        http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as running,
    ):
        server.end()
        ready = http.get("/health/ready")
        assert (ready.status_code, ready.json()["draining"]) == (503, True)
        assert http.get("/health/live").status_code == 200
        refused = http.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
        backend.gate.set()
        *chunks, done = [line.removeprefix("data: ") for line in running.iter_lines() if line]
    assert done == "[DONE]"
    assert running.status_code == 200
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    server.thread.join(20)
    assert not server.thread.is_alive()
    assert any("prompt=3 generated=4 outcome=length" in line for line in server.lines.queue)


class Endless:
    """An engine that goes on until it is told to stop."""

    ready = True
    info = EngineInfo("fake", "decoder", max_length=10**9, vocab_size=97)

    async def submit(self, request):
        return [EndlessStream()]

    async def metrics(self):
        return []


class EndlessStream:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def __aiter__(self):
        yield TokenChunk((1,), "x")
        await self.cancelled.wait()
        yield TokenChunk((), "", "cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("hurry", [False, True])
def test_what_takes_too_long_is_cancelled_and_told_so(served, hurry):
    server = served({"fake": Endless()}, ServerConfig(drain_timeout=600 if hurry else 0.1))
    answers = queue.Queue()
    whole = threading.Thread(
        target=lambda: answers.put(httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=30))
    )
    with (
        httpx.Client(base_url=server.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as running,
    ):
        lines = (line for line in running.iter_lines() if line)
        assert '"text":"x"' in next(lines)
        whole.start()
        while server.context.limiter.running < 2:
            assert http.get("/health").status_code == 200
        server.end()
        if hurry:
            server.end()
        event, data, done = lines
    assert (event, done) == ("event: error", "data: [DONE]")
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "shutting_down"
    answer = answers.get(timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    server.thread.join(20)
    assert not server.thread.is_alive()


@pytest.fixture(scope="module")
def long_bundle(make_bundle, tiny_model, cpu_plugin):
    model = tiny_model(max_context=30_000)
    return make_bundle(model.path, model.decoder, cpu_plugin, tokenizer=True)


def test_sigterm_ends_the_program_in_order(long_bundle, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "test"\nkey = "sk-test-secret"\n')
    command = [*KILN, "serve", str(long_bundle.path), "--name", "long", "--port", "0"]
    command += ["--kv-blocks", "4000", "--threads", "1", "--drain-timeout", "2", "--api-keys", str(keys)]
    ask = {"model": "long", "prompt": "HELLO", "max_tokens": 29_000, "ignore_eos": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            url = program.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), program.stderr.read()
            children = psutil.Process(program.pid).children()
            headers = {"Authorization": "Bearer sk-test-secret"}
            with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
                assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["long"]
                with http.stream("POST", "/v1/completions", json={**ask, "stream": True}) as running:
                    lines = (line for line in running.iter_lines() if line)
                    assert "choices" in next(lines)
                    program.send_signal(signal.SIGTERM)
                    while http.get("/health/ready").status_code == 200:
                        pass
                    assert http.post("/v1/completions", json=ask).status_code == 503
                    *_, event, data, done = lines
            output, log = program.communicate(timeout=60)
        finally:
            program.kill()
    assert (event, done) == ("event: error", "data: [DONE]")
    assert "shutting down" in data
    assert program.returncode == 0, log
    assert output == ""
    assert "POST /v1/completions 503" in log
    assert "POST /v1/completions 200" in log
    assert "key=test" in log
    assert "secret" not in log
    assert "HELLO" not in log
    assert "Traceback" not in log
    psutil.wait_procs(children, timeout=20)
    assert not any(child.is_running() for child in children)


def refusal(*arguments) -> str:
    """Why `kiln serve` does not start; `run_command` prints it and ends with code 2."""
    with pytest.raises(KilnError) as caught:
        serve_command.main([*map(str, arguments)], standalone_mode=False)
    return str(caught.value)


def test_a_start_that_cannot_succeed_says_why(tiny_bundle, tmp_path):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        error = refusal(tiny_bundle.path, "--port", port)
        assert error.startswith(f"cannot listen on 127.0.0.1 port {port}: ")
        assert error.endswith("choose another --host or --port")
    error = refusal(tiny_bundle.path, "--host", "0.0.0.0", "--port", 0)
    assert "without API keys everybody who reaches 0.0.0.0 could use the server" in error
    assert "cannot listen on nowhere.invalid" in refusal(tiny_bundle.path, "--host", "nowhere.invalid")
    error = refusal(tiny_bundle.path, tiny_bundle.path)
    assert error == "two bundles are called tiny; give each its own --name, in order"
    assert "there are 1 bundles and 2 names" in refusal(tiny_bundle.path, "--name", "a", "--name", "b")
    assert "max_running 300; a step holds one token" in refusal(tiny_bundle.path, "--max-running", 300)
    assert "drain_timeout is 0.0; expected a number above 0" in refusal(tiny_bundle.path, "--drain-timeout", 0)
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing")
    assert "No such file" in refusal(tiny_bundle.path, "--api-keys", tmp_path / "none")


def test_a_damaged_tokenizer_is_found_before_the_server_is_ready(fake_engine, recorded_engine, tmp_path):
    engine = recorded_engine(fake_engine(), tmp_path / "none")
    server = server_for({"fake": engine}, ServerConfig(), on_ready=lambda: pytest.fail("it is not"))
    with bind("127.0.0.1", 0) as listener, pytest.raises(KilnError, match="none is not a folder"):
        asyncio.run(server.serve([listener]))


def test_strangers_need_keys_or_a_word():
    keys = KeyRing({})
    for host in ("127.0.0.1", "::1", "localhost"):
        require_safe(host, None, False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "a.name"):
        require_safe(host, keys, False)
        require_safe(host, None, True)
        with pytest.raises(KilnError, match="give --api-keys FILE"):
            require_safe(host, None, False)
