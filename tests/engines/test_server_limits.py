"""What clients do wrong or do not do: bodies, numbers, pace, going away. None of it keeps blocks or delays others."""

import json
import socket
import threading

import httpx
import pytest

from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.request import TokenChunk
from engines.runtime.scheduler import SchedulerConfig
from engines.server.config import ServerConfig
from passes.onnx_model import DecoderSpec
from plugins.errors import KilnError

ASK = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 50, "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def start(fake_engine, recorded_engine, served):
    """Serves a fake engine; gives the server, the engine and a client."""
    clients = []

    def make(config=None):
        engine = recorded_engine(fake_engine())
        server = served({"fake": engine}, config)
        clients.append(httpx.Client(base_url=server.url, timeout=30))
        return server, engine, clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def http(fake_backend, recorded_engine, served_on):
    """A client of one fake engine for all tests that only send what is refused."""
    backend = fake_backend()
    decoder = DecoderSpec(backend.kv, backend.vocabulary, 200, (1,))
    with Engine.from_decoder(backend, decoder) as engine:
        server = served_on({"fake": recorded_engine(engine)})
        with httpx.Client(base_url=server.url) as client:
            yield client
        assert engine.free_blocks == 64


def error_of(answer):
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no JSON object"),
        (b"[]", "the body is no JSON object"),
        (b"null", "the body is no JSON object"),
        (b"{", "the body is not JSON in UTF-8: EOF while parsing"),
        (b'{"prompt": "\xff"}', "the body is not JSON in UTF-8: invalid unicode code point"),
        (rb'{"prompt": "\ud800"}', "the body is not JSON in UTF-8: unexpected end of hex escape"),
        (b'{"prompt": NaN}', "the body is not JSON in UTF-8: expected value"),
        (b"[" * 100_000, "the body is not JSON in UTF-8: recursion limit exceeded"),
        (b'{"a":' * 100_000, "the body is not JSON in UTF-8: recursion limit exceeded"),
        (b"9" * 100_000, "the body is not JSON in UTF-8: number out of range"),
    ],
)
def test_bodies_that_are_no_json(http, body, message):
    status, text = error_of(http.post("/v1/completions", content=body, headers=JSON))
    assert status == 400
    assert text.startswith(message)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "at least 1 item"),
        ({"prompt": [1, "a"]}, "prompt", "valid integer"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [97]}, None, "the prompt has token id 97; expected 0 to 96"),
        ({"prompt": [1] * 200}, None, "the prompt has 200 tokens"),
        ({"prompt": [[1]] * 129}, "prompt", "at most 128 items"),
        ({"prompt": [[1]] * 100, "n": 2}, "prompt", "100 prompts with 2 answers each are 200; expected at most 128"),
        ({"prompt": "text"}, "model", "fake has no tokenizer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logit_bias": {"97": 1}}, "logit_bias", "token id 97; expected 0 to 96"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "match pattern"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"best_of": 3}, "best_of", "only best_of equal to n is served"),
        ({"suffix": "x"}, "suffix", "None"),
        ({"echo": True, "logprobs": 1}, "echo", "log-probabilities of the prompt are not served"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"stop": "x"}, None, "no tokenizer, so stop strings cannot be found"),
        ({"use_beam_search": True}, "use_beam_search", "unknown field; remove it"),
    ],
)
def test_fields_that_are_wrong(http, change, param, message):
    answer = http.post("/v1/completions", json={**ASK, **change})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_a_schema_with_a_number_that_json_has_not(http):
    body = json.dumps(ASK)[:-1] + ', "guided_json": {"maximum": 1e999}}'
    status, text = error_of(http.post("/v1/completions", content=body, headers=JSON))
    assert (status, "a number that is not finite" in text) == (400, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "part of type 'image_url'; models here read text only"),
        ([{"type": "input_audio"}], "part of type 'input_audio'"),
        (None, "message 0 has no content"),
    ],
)
def test_messages_that_are_no_text(http, content, message):
    body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
    status, text = error_of(http.post("/v1/chat/completions", json=body))
    assert (status, message in text) == (400, True)


def test_a_context_that_is_too_long_has_openais_code(http):
    error = http.post("/v1/completions", json={**ASK, "prompt": [1] * 500}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_paths_and_methods_that_are_not_there(http):
    assert error_of(http.get("/v1/nothing"))[0] == 404
    assert error_of(http.delete("/v1/models"))[0] == 405
    assert error_of(http.post("/v1/models"))[0] == 405
    assert http.get("/v2/nothing").json()["error"].startswith("there is nothing at")


def test_a_body_that_is_too_large_is_refused_by_its_length(start):
    _, _, http = start(ServerConfig(max_body_bytes=1000))
    status, text = error_of(http.post("/v1/completions", content=b" " * 1001, headers=JSON))
    assert (status, text) == (413, "the body has more than 1000 bytes, the limit; send less at a time")
    padded = json.dumps(ASK).encode().ljust(1000)
    assert http.post("/v1/completions", content=padded, headers=JSON).status_code == 200


def test_a_body_without_a_length_is_refused_while_it_arrives(start):
    server, _, http = start(ServerConfig(max_body_bytes=100_000))
    sent = []

    def endless():
        for _ in range(5):
            sent.append(30_000)
            yield b" " * 30_000

    assert http.post("/v1/completions", content=endless(), headers=JSON).status_code == 413
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_without_end(raw)
    assert http.get("/health").status_code == 200


def send_without_end(raw) -> None:
    while True:
        raw.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")


def test_a_body_that_does_not_come_is_not_waited_for(start):
    server, _, _ = start(ServerConfig(body_timeout=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        answer = read_to_end(raw)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body was not whole after 0.2 s" in answer
    assert server.context.limiter.running == 0


def read_to_end(raw) -> bytes:
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: ", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /"])
def test_connections_without_a_whole_request_are_cut(start, sent):
    server, _, _ = start(ServerConfig(header_timeout=0.2, keep_alive=1))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(sent)
        try:
            answer = read_to_end(raw)
        except ConnectionResetError:
            answer = b""
    assert answer.count(b"HTTP/1.1 200 OK") == sent.count(b"\r\n\r\n")


def test_no_http_at_all(start):
    server, _, _ = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert read_to_end(raw).startswith(b"HTTP/1.1 400 ")


def test_more_requests_than_may_run_are_told_to_wait(start):
    server, engine, http = start(ServerConfig(max_concurrent=2))
    engine.engine.backend.gate.clear()
    ask = {**ASK, "stream": True}
    with http.stream("POST", "/v1/completions", json=ask), http.stream("POST", "/v1/completions", json=ask):
        third = http.post("/v1/completions", json=ASK)
        assert error_of(third) == (429, "the server works on 2 requests, its limit; try again later")
        assert third.headers["retry-after"] == "1"
        assert http.get("/health").status_code == 200
        engine.engine.backend.gate.set()
    server.lines.get(timeout=20)


def test_a_full_queue_is_429(fake_backend, recorded_engine, served):
    backend = fake_backend()
    decoder = DecoderSpec(backend.kv, backend.vocabulary, 200, (1,))
    config = SchedulerConfig(max_running=1, tokens_per_step=16, max_waiting=1)
    with Engine.from_decoder(backend, decoder, None, config) as engine:
        url = served({"fake": recorded_engine(engine)}).url
        backend.gate.clear()
        answer = httpx.post(f"{url}/v1/completions", json={**ASK, "prompt": [[1], [2], [3], [4]]})
        backend.gate.set()
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(start, stream, n):
    server, engine, _ = start()
    backend = engine.engine.backend
    backend.gate.clear()
    body = json.dumps({**ASK, "max_tokens": 150, "n": n, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        _, streams = engine.submitted.get(timeout=20)
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200 OK")
    line = server.lines.get(timeout=20)
    assert f"POST /v1/completions {200 if stream else 499} " in line
    assert "outcome=client_gone" in line
    backend.gate.set()
    assert len(streams) == n
    assert [s.result(20).finish_reason for s in streams] == ["cancelled"] * n
    assert engine.engine.free_blocks == 64
    assert server.context.limiter.running == 0
    assert not server.context.active


class Talkative:
    """An engine that says more than a socket holds, until it is told to stop."""

    ready = True
    info = EngineInfo("fake", "decoder", max_length=10**9, vocab_size=97)

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    async def submit(self, request):
        return [self]

    async def __aiter__(self):
        while not self.cancelled.is_set():
            yield TokenChunk((1,), "x" * 100_000)  # never waits: only the server can let others have a turn

    def cancel(self) -> None:
        self.cancelled.set()

    async def metrics(self):
        return []


def test_a_client_that_reads_nothing_is_cut(served):
    engine = Talkative()
    server = served({"fake": engine}, ServerConfig(stall_timeout=0.3))
    body = json.dumps({**ASK, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert engine.cancelled.wait(20)
    assert "outcome=client_gone" in server.lines.get(timeout=20)


def test_others_are_answered_while_a_long_prompt_is_tokenized(start):
    server, _, http = start()
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        def encode_all(self, texts):
            entered.set()
            assert go_on.wait(20)
            return [[1, 2, 3] for _ in texts]

    server.context._tokenizers["fake"] = Slow()
    server.context.engine("fake").info = EngineInfo("fake", "decoder", tokenizer="x", max_length=200, vocab_size=97)
    answers = []
    long = {**ASK, "prompt": "A" * 10**6}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=30))
    )
    asking.start()
    assert entered.wait(20)
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json=ASK).status_code == 200
    go_on.set()
    asking.join(20)
    assert answers[0].status_code == 200


def test_requests_have_an_id_and_the_log_shows_no_prompt(start):
    server, _, http = start()
    given = http.post("/v1/completions", json={**ASK, "user": "prompt-text"}, headers={"X-Request-Id": "my-id.1"})
    assert given.headers["x-request-id"] == "my-id.1"
    assert given.json()["id"] == "cmpl-my-id.1"
    made = http.get("/health?prompt-text", headers={"X-Request-Id": "not\tallowed"})
    assert len(made.headers["x-request-id"]) == 32
    lines = [server.lines.get(timeout=20) for _ in range(2)]  # in either order: after an answer is sent
    assert {line.rpartition("id=")[2] for line in lines} == {a.headers["x-request-id"] for a in (given, made)}
    assert not any("prompt-text" in line for line in lines)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(KilnError, match="max_concurrent is 0; expected a number above 0"):
        ServerConfig(max_concurrent=0)
