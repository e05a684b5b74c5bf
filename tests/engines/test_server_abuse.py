"""A server that many use badly at once, over real sockets: the right answers, nothing left behind, health green.

What each kind of abuse gets by itself is in test_server_limits; here they come in numbers, beside requests that are
well behaved, and what the process holds is counted before and after.
"""

import asyncio
import hashlib
import json
import os
import re
import resource
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.server.auth import Caller, KeyRing
from engines.server.config import ServerConfig

KEY = "sk-good-secret"
CONNECTIONS = 500
KEYS = KeyRing({hashlib.sha256(KEY.encode()).digest(): Caller("good", "good")})
HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
AUTHORIZATION = b"Authorization: Bearer %s\r\n"


def ask(**change) -> dict:
    return {"model": "tiny", "prompt": "HELLO", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **change}


def raw(body: dict | bytes, path: bytes = b"/v1/completions", length: int | None = None) -> bytes:
    """A whole request, or one that announces another length than it has."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    return HEAD % path + AUTHORIZATION % KEY.encode() + b"Content-Length: %d\r\n\r\n" % size + content


def wait_until(reached, problem) -> None:
    """Look again and again at what happens on other threads, or in the kernel."""
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end, problem()
        threading.Event().wait(0.005)


class Watched:
    """A server, what its process holds, and a thread that asks all the time whether it is well."""

    def __init__(self, server, engine: Engine) -> None:
        self.server, self.engine = server, engine
        self.url, self.port = server.url, server.port
        self.answers: Counter[object] = Counter()  # of /health
        self._asking = threading.Lock()
        self._end = threading.Event()
        self._nurse = threading.Thread(target=self._ask_for_health)
        self._nurse.start()
        asyncio.run_coroutine_threadsafe(_fill_thread_pool(), server.server._loop).result(30)
        wait_until(lambda: self.answers, lambda: "the server answers no health check")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def holds(self) -> dict[str, int]:
        """What must not grow, counted between two health checks."""
        with self._asking:
            tasks = asyncio.run_coroutine_threadsafe(_count_tasks(), self.server.server._loop).result(20)
            return {
                "files": psutil.Process().num_fds(),
                "threads": threading.active_count(),
                "connections": len(self.server.server.server_state.connections),
                "tasks": tasks,
                "blocks": self.engine.backend.num_blocks - self.engine.free_blocks,
                "requests": self.server.context.limiter.running + len(self.server.context.active),
            }

    def close(self) -> None:
        self._end.set()
        self._nurse.join(30)

    def _ask_for_health(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as http:
            while not self._end.wait(0.005):  # in between, others get the lock
                for path in ("/health/live", "/health/ready"):
                    with self._asking:
                        self.answers[_status_of(http, path)] += 1


def _status_of(http: httpx.Client, path: str) -> object:
    try:
        return http.get(path).status_code
    except httpx.HTTPError as error:
        return repr(error)


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


async def _fill_thread_pool() -> None:
    """Start every thread of the loop's pool, which only grows, to the limit that `asyncio.to_thread` documents."""
    together = threading.Barrier(min(32, (os.cpu_count() or 1) + 4))
    await asyncio.gather(*(asyncio.to_thread(together.wait, 30) for _ in range(together.parties)))


@pytest.fixture(scope="module", autouse=True)
def many_files():
    """Both ends of every connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * CONNECTIONS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def engine(tiny_bundle, recorded_engine):
    with Engine.open(tiny_bundle.path, kv_blocks=200, config=SchedulerConfig(16, 64), threads=1) as engine:
        engine.generate([[1]], SamplingParams(max_tokens=1))  # starts the threads of the engine
        yield recorded_engine(engine)


@pytest.fixture(scope="module")
def patient(engine, served_on):
    """Limits of time as they are by default: nobody here is too slow for them."""
    watched = Watched(served_on({"tiny": engine}, ServerConfig(max_body_bytes=2**21), KEYS), engine.engine)
    yield watched
    watched.close()


@pytest.fixture
def server(patient):
    with nothing_left(patient):
        yield patient


@contextmanager
def nothing_left(watched: Watched):
    """Afterwards the process holds no more than before, and the server has said all the time that it is well."""
    wait_until(lambda: watched.holds()["connections"] == 1, watched.holds)
    before = watched.holds()
    watched.answers.clear()
    yield

    def grown() -> dict[str, tuple[int, int]]:
        after = watched.holds()
        return {name: (before[name], after[name]) for name in before if after[name] > before[name]}

    wait_until(lambda: not grown(), grown)
    assert set(watched.answers) == {200}


def well_behaved(server: Watched, count: int) -> None:
    """Requests as they should be are answered, whatever others do."""
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        for _ in range(count):
            answer = http.post("/v1/completions", json=ask())
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)


def test_500_connections_at_once(server):
    """All are open before the first one asks. Every fifth goes away at once, after asking for a long answer."""
    kinds = {
        "whole": (raw(ask()), "200"),
        "stream": (raw(ask(stream=True)), "200"),
        "wrong key": (raw(ask()).replace(KEY.encode(), b"sk-wrong-secret"), "401"),
        "no json": (raw(b"{"), "400"),
        "gone": (raw(ask(stream=True, max_tokens=200)), ""),
    }
    found: Counter[tuple[str, str]] = Counter()

    async def one(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(kinds[name][0].replace(b"\r\nHost", b"\r\nConnection: close\r\nHost", 1))
        await writer.drain()
        answer = b"" if name == "gone" else await reader.read()
        writer.transport.abort()
        found[name, answer[9:12].decode()] += 1
        if name == "stream":
            assert answer.count(b"data: {") >= 1
            assert b"data: [DONE]" in answer

    async def everybody() -> None:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS)]
        names = list(kinds) * (CONNECTIONS // len(kinds))
        await asyncio.gather(*(one(name, *ends) for name, ends in zip(names, opened, strict=True)))

    asyncio.run(asyncio.wait_for(everybody(), 60))
    assert found == {(name, status): CONNECTIONS // len(kinds) for name, (_, status) in kinds.items()}


def test_slow_readers_delay_nobody_and_get_all_of_their_answers(server):
    """What they do not take fills the sockets; the engine is done with them long before they have read anything."""
    (listener,) = server.server.server.servers[0].sockets
    roomy = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2  # Linux reports twice of what was set
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # for connections from now on
    slow = []
    try:
        for _ in range(20):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(30)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(raw(ask(max_tokens=200, stream=True, logprobs=5)))
            slow.append(reader)
        wait_until(lambda: len(server.server.context.active) == 20, lambda: server.server.context.active)
        well_behaved(server, 20)
        wait_until(lambda: server.engine.free_blocks == 200, lambda: server.engine.free_blocks)
        assert len(server.server.context.active) == 20, "the answers fit into the sockets: nobody was slow"
        for reader in slow:
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                part = reader.recv(1000)
                assert part
                answer += part
            assert b"data: [DONE]" in answer
            assert answer.count(b'"finish_reason":"length"') == 1
    finally:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, roomy)
        for reader in slow:
            reader.close()


def silent(server):
    return server.connect()


def half_of_the_headers(server):
    end = server.connect()
    end.sendall(HEAD[:40])
    return end


def half_of_the_body(server):
    end = server.connect()
    end.sendall(raw(b'{"model": ', length=1000))
    return end


def no_more_to_say(server):
    """The client's half is closed in the middle of the body."""
    end = half_of_the_body(server)
    end.shutdown(socket.SHUT_WR)
    return end


def reset_in_an_answer(server):
    end = server.connect()
    end.sendall(raw(ask(stream=True, max_tokens=200)))
    assert end.recv(12) == b"HTTP/1.1 200"
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
    return end


def reset_in_a_body(server):
    end = half_of_the_body(server)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
    return end


def test_half_open_sockets_are_cut_while_others_are_served(engine, served):
    impatient = ServerConfig(header_timeout=0.5, body_timeout=0.5)
    server = Watched(served({"tiny": engine}, impatient, KEYS), engine.engine)
    try:
        with nothing_left(server):
            cut_half_open_sockets(server)
    finally:
        server.close()


def cut_half_open_sockets(server: Watched) -> None:
    kinds = (silent, half_of_the_headers, half_of_the_body, no_more_to_say, reset_in_an_answer, reset_in_a_body)
    ends = [(kind, kind(server)) for kind in kinds for _ in range(20)]
    well_behaved(server, 20)
    for kind, end in ends:
        if kind is half_of_the_body:
            assert received(end).startswith(b"HTTP/1.1 408 ")
        elif kind in (silent, half_of_the_headers, no_more_to_say):
            assert received(end) == b""
        end.close()


def received(end: socket.socket) -> bytes:
    """Everything until the server closes, or cuts, the connection."""
    parts = []
    try:
        while part := end.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_prompts_of_a_megabyte(server):
    """As text and as token ids they are read, tokenised and refused; well-behaved requests go on beside them."""
    text, ids = "A" * 2**20, [1] * (2**19)
    bodies = [ask(prompt=text), ask(prompt=ids), ask(prompt=text, stream=True), ask(prompt=[text, "A"])]
    bodies += [{"model": "tiny", "messages": [{"role": "user", "content": text}]}]
    too_large = ask(prompt="A" * 2**21)
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        with ThreadPoolExecutor(12) as pool:
            sent = [pool.submit(http.post, "/v1/completions", json=body) for body in bodies[:4]]
            sent += [pool.submit(http.post, "/v1/completions", json=too_large) for _ in range(2)]
            well_behaved(server, 10)
            answers = [future.result() for future in sent]
        chat = http.post("/v1/chat/completions", json=bodies[4])
        tokens = http.post("/tokenize", json={"model": "tiny", "prompt": text[: 2**17]})
    assert [answer.status_code for answer in answers] == [400] * 4 + [413] * 2
    assert {answer.json()["error"]["code"] for answer in answers[:4]} == {"context_length_exceeded"}
    assert chat.status_code == 400
    assert (tokens.status_code, tokens.json()["count"]) == (200, 2**17)


HOSTILE = {
    "nothing": b"",
    "no object": b"[]",
    "cut off": b'{"model": "tiny"',
    "invalid UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe\xc0\x80"}',
    "a lone surrogate": rb'{"model": "tiny", "prompt": "\ud800"}',
    "overlong UTF-8": b'{"model": "tiny", "prompt": "\xe0\x80\x80"}',
    "a NUL in a name": rb'{"model": "tiny\u0000", "prompt": "A", "input": "A", "tokens": [1]}',
    "not a number": b'{"model": "tiny", "prompt": "A", "temperature": NaN}',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep in a schema": b'{"model": "tiny", "prompt": "A", "guided_json": ' + b'{"not":' * 5000 + b"{}" + b"}" * 5001,
    "a long number": b'{"model": "tiny", "prompt": "A", "max_tokens": ' + b"9" * 100_000 + b"}",
    "a large exponent": b'{"model": "tiny", "prompt": "A", "temperature": 1e999999}',
    "many names": b"{" + b",".join(b'"%d": 0' % i for i in range(50_000)) + b"}",
    "the same name": b"{" + b",".join([b'"model": "tiny"'] * 50_000) + b"}",
    "another type": b'{"model": {"a": 1}, "prompt": {"b": 2}, "messages": 3, "input": 4, "tokens": "x", "inputs": 5}',
}


def concrete(path: str) -> str:
    return re.sub(r"{\w+}", "tiny", path)


def test_hostile_bodies_on_every_path(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    paths = [concrete(path) for path, methods in document["paths"].items() if "post" in methods]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v2/models/tiny/infer"} <= set(paths)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http, ThreadPoolExecutor(8) as pool:
        sent = {(p, name): pool.submit(http.post, p, content=body) for p in paths for name, body in HOSTILE.items()}
        well_behaved(server, 10)
        answers = {case: future.result() for case, future in sent.items()}
    wrong = {case: answer.status_code for case, answer in answers.items() if answer.status_code not in (400, 404)}
    assert not wrong
    assert all(answer.json()["error"] for answer in answers.values())


def test_wrong_keys_on_every_path(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    open_paths = {"/", "/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
    asked = [
        (method.encode().upper(), concrete(path).encode())
        for path, methods in document["paths"].items()
        for method in methods
        if path not in open_paths
    ]
    wrong = [
        b"",
        AUTHORIZATION % b"sk-good-secre",
        AUTHORIZATION % b"sk-good-secret2",
        AUTHORIZATION % KEY.upper().encode(),
        AUTHORIZATION % b"\xff\xfe\xe9",
        AUTHORIZATION % (b"x" * 30_000),
        AUTHORIZATION % b" ",
        b"Authorization: Basic c2stZ29vZC1zZWNyZXQ=\r\n",
        b"Authorization: " + KEY.encode() + b"\r\n",
        b"X-Api-Key: " + KEY.encode() + b"\r\n",
    ]
    assert len(asked) > 10

    def status(case) -> bytes:
        (method, path), header = case
        with server.connect() as end:
            end.sendall(b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n" % (method, path, header))
            answer = received(end)
        assert answer.count(b"\r\nwww-authenticate: Bearer\r\n") == 1
        return answer[9:12]

    cases = [(one, header) for one in asked for header in wrong]
    with ThreadPoolExecutor(20) as pool:
        assert Counter(pool.map(status, cases)) == {b"401": len(cases)}
    well_behaved(server, 3)
