"""`kiln serve` under random use over real sockets: answers, streams, clients that go away at any moment, nonsense."""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil

from soaking.in_process import OUTCOME_SECONDS, RUNNING, tight_blocks
from soaking.outcomes import Outcomes

CLIENTS = 24
HOSTILE = (b"", b"{", b"[" * 5000, b'{"prompt": "\xff"}', b'{"model": 1}', b"null", b'{"a":' * 5000)
REFUSALS = (400, 404, 413, 429)
ROOT = Path(__file__).resolve().parents[2]


class Server:
    """`kiln serve` of one bundle on a free port, with too few blocks for all that may run."""

    def __init__(self, bundle: Path, kv_blocks: int | None) -> None:
        options = {
            "name": "soaked",
            "port": 0,
            "kv-blocks": kv_blocks or tight_blocks(bundle),
            "max-running": RUNNING,
            "tokens-per-step": 64,
            "max-waiting": 3 * RUNNING,
            "header-timeout": 1,
            "body-timeout": 1,
            "keep-alive": 2,
        }
        command = [sys.executable, "-c", "from kiln_launcher import kiln; kiln()", "serve", str(bundle)]
        command += ["--no-log-requests", *(f"--{name}={value}" for name, value in options.items())]
        self.process = psutil.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        first = self.process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)", first)
        if found is None:
            self.process.kill()
            raise SystemExit(f"kiln serve did not start; it said {first!r}")
        self.url, self.host, self.port = found[0], found[1], int(found[2])

    def count(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if re.match(rf"{name}[{{ ]", line)]
        if not lines:
            raise SystemExit(f"{self.url}/metrics has no {name}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def end(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except psutil.TimeoutExpired:
            self.process.kill()
            return -1


class HttpSoak:
    """Uses a server until `run` is told to end."""

    def __init__(self, server: Server, outcomes: Outcomes, seed: int) -> None:
        self._server = server
        self._outcomes = outcomes
        self._seed = seed
        self._doing: dict[Callable[[str, random.Random, httpx.AsyncClient], Awaitable[None]], int] = {
            self._whole: 6,
            self._streamed: 4,
            self._left: 5,
            self._half_sent: 2,
            self._hostile: 3,
            self._wrong: 3,
            self._looked: 2,
        }

    def run(self, seconds: float) -> None:
        asyncio.run(self._run(time.monotonic() + seconds))

    async def _run(self, end: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS // 2)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=OUTCOME_SECONDS, limits=limits) as http:
            await asyncio.gather(*(self._use(number, end, http) for number in range(CLIENTS)))

    async def _use(self, number: int, end: float, http: httpx.AsyncClient) -> None:
        generator = random.Random(f"{self._seed} {number}")
        while time.monotonic() < end:
            (do,) = generator.choices(list(self._doing), list(self._doing.values()))
            kind = do.__name__.strip("_")
            self._outcomes.begin(kind)
            try:
                await do(kind, generator, http)
            except httpx.RemoteProtocolError as error:
                # A kept-alive connection that the server closed just then is the client's to try again.
                self._outcomes.end(kind, "closed while idle", "without sending a response" in str(error))
            except Exception as error:
                self._outcomes.end(kind, repr(error), expected=False)

    def _ask(self, generator: random.Random, **change: object) -> dict[str, object]:
        letters = "".join(generator.choices("ABCDEFGHIJKLMNOP", k=generator.randint(1, 100)))
        return {
            "model": "soaked",
            "prompt": ("SHARED" * 10 if generator.random() < 0.5 else "") + letters,
            "max_tokens": generator.randint(1, 60),
            "n": generator.choice((1, 1, 1, 3)),
            "temperature": generator.choice((0, 1)),
            "logprobs": generator.choice((None, None, 2)),
            "ignore_eos": generator.random() < 0.5,
            "lane": generator.choice(("interactive", "batch")),
            **change,
        }

    async def _whole(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json=self._ask(generator))
        self._outcomes.end(kind, answer.status_code, answer.status_code in (200, 429))

    async def _streamed(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=self._ask(generator, stream=True)) as answer:
            text = (await answer.aread()).decode()
        if answer.status_code == 200 and not text.rstrip().endswith("data: [DONE]"):
            self._outcomes.end(kind, f"a stream that ends with {text[-200:]!r}", expected=False)
        else:
            self._outcomes.end(kind, answer.status_code, answer.status_code in (200, 429))

    async def _left(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        """The client goes away before the answer, or in the middle of it."""
        reader, writer = await self._connect()
        writer.write(_raw(self._ask(generator, stream=generator.random() < 0.7)))
        await writer.drain()
        for _ in range(generator.choice((0, 0, 1, 3))):
            await asyncio.wait_for(reader.read(200), OUTCOME_SECONDS)
        writer.transport.abort()
        self._outcomes.end(kind, "left")

    async def _half_sent(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        """A request that breaks off; the client waits for what comes of it, or goes away."""
        reader, writer = await self._connect()
        whole = _raw(self._ask(generator))
        writer.write(whole[: generator.randrange(len(whole))])
        await writer.drain()
        if generator.random() < 0.5:
            answer = await asyncio.wait_for(reader.read(), OUTCOME_SECONDS)
            status = answer[9:12].decode() or "cut"
            self._outcomes.end(kind, status, status in ("408", "cut"))
        else:
            self._outcomes.end(kind, "left")
        writer.transport.abort()

    async def _hostile(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        path = generator.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/v2/models/soaked/infer"))
        headers = {"Content-Type": "application/json"}
        answer = await http.post(path, content=generator.choice(HOSTILE), headers=headers)
        self._outcomes.end(kind, answer.status_code, answer.status_code in REFUSALS)

    async def _wrong(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        changes = ({"model": "x"}, {"prompt": ""}, {"prompt": [10**9]}, {"prompt": [1] * 20000}, {"n": 0}, {"top_p": 2})
        answer = await http.post("/v1/completions", json=self._ask(generator, **generator.choice(changes)))
        self._outcomes.end(kind, answer.status_code, answer.status_code in REFUSALS)

    async def _looked(self, kind: str, generator: random.Random, http: httpx.AsyncClient) -> None:
        path = generator.choice(("/health/ready", "/health/live", "/metrics", "/v1/models", "/status.json", "/"))
        answer = await http.get(path)
        self._outcomes.end(kind, answer.status_code, answer.status_code == 200)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.host, self._server.port)


def _raw(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(content) + content
