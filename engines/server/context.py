"""What every route of one server shares: engines, limits, who calls, and what the log line will say.

Routes get it by annotation and never see keys or middleware:

    @router.post("/v1/things")
    async def things(body: Things, context: Context, caller: Calling, record: Record) -> ...:
        engine = context.engine(body.model)                      # ApiError 404
        lane = context.lane(caller, body.lane)                   # ApiError 403
        outputs = await engine.infer(inputs, lane=lane, timeout=context.config.request_timeout)

What engines raise (KilnError, QueueFullError, RequestError, TimeoutError) may simply be let through: the app answers
it as `errors.api_error` says. When the client goes away, the task that runs the route is cancelled. API key, number of
requests at a time and size of the body are checked before a route runs; a route that changes nothing and is cheap is a
GET, everything that makes an engine work a POST.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from engines.runtime.sequence import Lane
from engines.runtime.tokenizer import Tokenizer
from engines.server.auth import ANONYMOUS, Caller, KeyRing
from engines.server.config import ServerConfig
from engines.server.errors import RETRY_SOON, ApiError
from engines.server.served import ServedEngine, TokenStream
from engines.server.token_text import TokenText


class Limiter:
    """Counts requests in the works. Used on the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_caller: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return self._by_caller.total()

    def enter(self, caller: Caller) -> None:
        """Raises ApiError 429 when the server or the caller has as many as it may."""
        if self.running >= self._most:
            raise ApiError(
                429, f"the server works on {self._most} requests, its limit; try again later", headers=RETRY_SOON
            )
        if caller.max_concurrent is not None and self._by_caller[caller.name] >= caller.max_concurrent:
            raise ApiError(
                429,
                f"the key {caller.name} has {caller.max_concurrent} requests running, its limit; wait for one to end",
                code="rate_limit_exceeded",
                headers=RETRY_SOON,
            )
        self._by_caller[caller.name] += 1
        self._idle.clear()

    def leave(self, caller: Caller) -> None:
        self._by_caller[caller.name] -= 1
        if not self.running:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass(eq=False)
class RequestRecord:
    """What the log line of one request says. Routes fill in what they learn; never a prompt or a key."""

    id: str
    key: str = "-"
    """The key's name."""
    model: str = "-"
    prompt_tokens: int = 0
    generated_tokens: int = 0
    outcome: str = "-"
    """Finish reason or error code, where there is one."""
    streams: list[TokenStream] = field(default_factory=list)
    """Answers that the engine works on for it; whatever happens, they are cancelled when the request ends."""

    def cancel(self) -> None:
        """End its answers; those that are done already are not touched."""
        for stream in self.streams:
            stream.cancel()


@dataclass
class ServerContext:
    """State of one server, at `app.state.context`."""

    engines: Mapping[str, ServedEngine]
    config: ServerConfig = field(default_factory=ServerConfig)
    keys: KeyRing | None = None
    """None: everybody may call."""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.config.max_concurrent)
        self.active: set[RequestRecord] = set()
        """Requests in the works, so that the server can end them."""
        self.draining = False
        self._tokenizers: dict[str, Tokenizer] = {}
        self._token_texts: dict[str, TokenText] = {}

    @property
    def ready(self) -> bool:
        """Whether requests are taken: the server is not ending, and every engine is there."""
        return not self.draining and all(engine.ready for engine in self.engines.values())

    async def load(self) -> None:
        """Load every tokenizer now, so that no request waits for that. Raises KilnError for one that is damaged."""
        for name, engine in self.engines.items():
            if engine.info.tokenizer is not None:
                await asyncio.to_thread(self.tokenizer, name)

    def engine(self, name: str) -> ServedEngine:
        """Raises ApiError 404 for a name that is not served."""
        if name not in self.engines:
            raise ApiError(
                404,
                f"the model {name!r:.80} is not served here; expected one of {', '.join(self.engines)}",
                param="model",
                code="model_not_found",
            )
        return self.engines[name]

    def decoder(self, name: str) -> ServedEngine:
        """An engine that generates text. Raises ApiError."""
        engine = self.engine(name)
        if engine.info.kind != "decoder":
            raise ApiError(
                400,
                f"{name} generates no text; use /v1/embeddings or /v2/models/{name}/infer",
                param="model",
                code="model_not_supported",
            )
        return engine

    def tokenizer(self, name: str) -> Tokenizer:
        """The tokenizer of a served model, loaded when it is first asked for: call it on a thread of its own.

        Raises ApiError where there is none.
        """
        folder = self.engine(name).info.tokenizer
        if folder is None:
            raise ApiError(400, f"{name} has no tokenizer; give token ids instead of text", param="model")
        if name not in self._tokenizers:
            self._tokenizers[name] = Tokenizer(Path(folder))
        return self._tokenizers[name]

    def token_text(self, name: str) -> TokenText:
        """The spelling of a served model's tokens. Raises and is called as `tokenizer`."""
        if name not in self._token_texts:
            self._token_texts[name] = TokenText(self.tokenizer(name))
        return self._token_texts[name]

    def lane(self, caller: Caller, wanted: Lane | None) -> Lane:
        """The lane of a request. Raises ApiError 403 for one that the caller may not use."""
        lane = wanted or caller.lane
        if not caller.may_use(lane):
            raise ApiError(
                403, f"the key {caller.name} may not use the lane {lane}; use {caller.highest_lane}", param="lane"
            )
        return lane


# async, although they wait for nothing: FastAPI runs other dependencies on threads, three hops for every request.
async def _context(connection: HTTPConnection) -> ServerContext:
    return connection.app.state.context


async def _caller(connection: HTTPConnection) -> Caller:
    return connection.scope.get("kiln.caller", ANONYMOUS)


async def _record(connection: HTTPConnection) -> RequestRecord:
    return connection.scope["kiln.record"]


Context = Annotated[ServerContext, Depends(_context)]
Calling = Annotated[Caller, Depends(_caller)]
Record = Annotated[RequestRecord, Depends(_record)]
