"""`kiln load` over real HTTP: a server that fails on demand, and Kiln's own over a real engine."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.runtime.engine import Engine
from pipeline.load_test.run import LoadConfig, Run, replay
from pipeline.load_test.targets import UrlTarget
from pipeline.load_test.trace import Lengths, TraceRequest, Workload
from plugins.errors import KilnError

ROOT = Path(__file__).parents[2]


class Served:
    """An application on a real socket, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        import uvicorn

        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


class Server(Served):
    """Speaks the OpenAI API as far as a load generator sees it, and fails on demand: by the prompt's length."""

    KEY = "secret-key"

    def __init__(self) -> None:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, StreamingResponse

        app = FastAPI()
        self.bodies: list[dict[str, Any]] = []
        self.arrived = threading.Event()

        def denied(request: Request) -> bool:
            return request.headers.get("authorization") != f"Bearer {self.KEY}"

        @app.get("/v1/models")
        async def models(request: Request):
            if denied(request):
                return JSONResponse({"error": {"message": "wrong key"}}, 401)
            return {"data": [{"id": "m", "vocab_size": 321}, {"id": "slow"}]}

        async def answer(body: dict[str, Any], tokens: int, choice: Callable[[int], dict[str, Any]]):
            count = body["max_tokens"]
            for place in range(count):
                if tokens == 6 and place == 1:
                    yield 'data: {"error": {"message": "the step failed"}}\n\n'
                    return
                if tokens == 7 and place == 1:
                    return
                if body["model"] == "slow" and place == 1:
                    await asyncio.Event().wait()
                last = {"finish_reason": "length"} if place == count - 1 else {"finish_reason": None}
                text = choice(place) if place < count - 1 else choice(0)  # a token without text is never the last
                yield f"data: {json.dumps({'choices': [text | last]})}\n\n"
            usage = {"prompt_tokens": tokens, "completion_tokens": count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        @app.post("/v1/completions")
        async def completions(request: Request):
            body = await request.json()
            self.bodies.append(body)
            self.arrived.set()
            if len(body["prompt"]) == 5:
                return JSONResponse({"error": {"message": "too many wait"}}, 429)
            stream = answer(body, len(body["prompt"]), lambda place: {"text": "" if place == 1 else "x"})
            return StreamingResponse(stream, media_type="text/event-stream")

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            body = await request.json()
            self.bodies.append(body)

            async def stream():
                yield 'data: {"choices": [{"delta": {"role": "assistant"}, "finish_reason": null}]}\n\n'
                async for event in answer(body, 9, lambda place: {"delta": {"content": "x"}}):
                    yield event

            return StreamingResponse(stream(), media_type="text/event-stream")

        super().__init__(app)


@pytest.fixture
def server() -> Iterator[Server]:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package)
    running = Server()
    yield running
    running.close()


def run_url(server: Server, trace: tuple[TraceRequest, ...], **connect: Any) -> tuple[UrlTarget, Run]:
    async def run() -> tuple[UrlTarget, Run]:
        target = await UrlTarget.connect(server.url, **({"api_key": server.KEY, "model": "m"} | connect))
        try:
            return target, await replay(target, trace, LoadConfig(warmup=0, timeout=60))
        finally:
            await target.close()

    return asyncio.run(run())


def test_a_server_gets_exactly_the_tokens_of_the_trace(server: Server) -> None:
    trace = Workload(Lengths(40, 0.5, 10, 200), Lengths(6, 0.4), rate=500.0).draw(30, 0)
    target, run = run_url(server, trace)
    assert target.vocabulary == 321
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert sent == sorted((request.prompt_tokens, request.output_tokens) for request in trace)
    for body in server.bodies:
        assert (body["model"], body["ignore_eos"], body["stream"]) == ("m", True, True)
        assert "lane" not in body
        assert max(body["prompt"]) < 321
    for each in run.outcomes:
        assert each.answered
        assert each.prompt_tokens == each.planned_prompt
        assert each.output_tokens == each.planned_output == len(each.deliveries)


def test_messages_go_to_the_chat_endpoint_and_lanes_are_named(server: Server) -> None:
    messages = ({"role": "user", "content": "Hello"},)
    trace = (
        TraceRequest(messages=messages, output_tokens=3),
        TraceRequest(prompt="four", output_tokens=2, lane="batch"),
    )
    _, run = run_url(server, trace)
    chat, text = sorted(server.bodies, key=lambda body: "prompt" in body)
    assert chat["messages"] == list(messages)
    assert (text["prompt"], text["lane"]) == ("four", "batch")
    by_index = {outcome.index: outcome for outcome in run.outcomes}
    assert (by_index[0].prompt_tokens, len(by_index[0].deliveries)) == (9, 3)
    assert by_index[1].prompt_tokens == 4


def test_errors_of_a_server_have_their_kinds(server: Server) -> None:
    trace = tuple(TraceRequest(prompt_tokens=count, output_tokens=4) for count in (5, 6, 7, 8))
    _, run = run_url(server, trace)
    found = {outcome.planned_prompt: (outcome.error, outcome.message) for outcome in run.outcomes}
    assert found[5] == ("HTTP 429", "too many wait")
    assert found[6] == ("failed", "the step failed")
    assert found[7][0] == "disconnected"
    assert found[8] == (None, "")


def test_a_server_that_cannot_be_used_is_refused_at_once(server: Server) -> None:
    for options, message in (
        ({"api_key": None}, "401: wrong key; .*--api-key-file"),
        ({"model": None}, "serves m, slow; choose one with --model"),
        ({"model": "absent"}, "serves m, slow, not absent"),
    ):
        with pytest.raises(KilnError, match=message):
            run_url(server, (), **options)
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(KilnError, match=r"no answer from .*ConnectError"):
        asyncio.run(UrlTarget.connect(f"http://127.0.0.1:{port}"))


def test_an_interrupt_of_the_command_prints_what_it_has(server: Server, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{server.KEY}\n")
    program = "from pipeline.cli import kiln_group, run_command; run_command(kiln_group)"
    command = [sys.executable, "-c", program, "load", f"{server.url}/v1", "--model", "slow", "--warmup", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--api-key-file", str(key)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.arrived.wait(60), process.communicate(timeout=10)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["sent"] >= document["unfinished"] >= 1
    assert "Traceback" not in err


def test_kilns_own_server_is_loaded(llama_bundle: Path) -> None:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package)
    from engines.server.app import create_app
    from engines.server.served import LocalEngine

    trace = (
        *Workload(Lengths(30, 0.4), Lengths(5, 0.3), shared_prefix=32).draw(6, 0),
        TraceRequest(prompt="Hello", output_tokens=3, lane="batch"),
        TraceRequest(prompt_tokens=9999, output_tokens=3),
    )
    with Engine.open(llama_bundle, threads=1) as engine:
        running = Served(create_app({"llama": LocalEngine(engine)}))

        async def run() -> Run:
            target = await UrlTarget.connect(running.url, vocabulary=500)
            try:
                return await replay(target, trace, LoadConfig(3, warmup=1, timeout=60))
            finally:
                await target.close()

        result = asyncio.run(run())
        running.close()
        assert engine.free_blocks == engine.info.num_blocks
    *answered, refused = sorted(result.outcomes, key=lambda each: each.index)
    for each, asked in zip(answered, trace, strict=False):
        assert each.answered, each.message
        assert each.output_tokens == asked.output_tokens
        assert asked.prompt_tokens in (None, each.prompt_tokens)
    assert refused.error == "HTTP 400"
    assert "9999 tokens" in refused.message
