"""What every request passes before a route sees it: key, shutdown, number at a time, size and pace of the body.

GET requests need a key where keys are used, except on OPEN_PATHS. POST requests are work: they are refused while the
server is ending, counted, and their body is read here, whole and within limits, whatever its framing. While a route
works on one, its client is watched: when it goes away, the route's task is cancelled.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.server.auth import ANONYMOUS, Caller
from engines.server.context import RequestRecord, ServerContext
from engines.server.errors import ApiError, shutting_down

OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/openapi.json"}
)
"""Served without a key: whether the server works, what it looks like, and nothing about who uses it."""

METRICS_PATHS = frozenset({"/metrics", "/status.json"})

_DISCARD_SECONDS = 5.0
"""How long the rest of a refused body is read, because a client that is still sending may not see the answer."""


class _ClientGoneError(Exception):
    """The client went away before its request was whole."""


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["kiln.record"]
        body = _Body(scope, receive, self._context.config.max_body_bytes)
        try:
            caller = self._caller(scope)
            scope["kiln.caller"] = caller
            record.key = caller.name
            if scope["method"] == "POST":
                await self._work(scope, body, send, caller)
            else:
                await self._app(scope, receive, send)
        except ApiError as error:
            record.outcome = error.code or "-"
            if not await body.discard():
                error.headers = {**(error.headers or {}), "Connection": "close"}
            await error.response(scope["path"])(scope, receive, send)
        except _ClientGoneError:
            pass

    def _caller(self, scope: Scope) -> Caller:
        """Raises ApiError 401."""
        keys, config, path = self._context.keys, self._context.config, scope["path"]
        if keys is None or path in OPEN_PATHS or (config.open_metrics and path in METRICS_PATHS):
            return ANONYMOUS
        presented = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = presented.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            problem, code = "no API key; send the header Authorization: Bearer KEY", "missing_api_key"
        elif caller := keys.caller(key.strip()):
            return caller
        else:
            problem, code = "the API key is not known here; ask the operator for one", "invalid_api_key"
        raise ApiError(401, problem, code=code, headers={"WWW-Authenticate": "Bearer"})

    async def _work(self, scope: Scope, body: "_Body", send: Send, caller: Caller) -> None:
        if self._context.draining:
            raise shutting_down()
        self._context.limiter.enter(caller)
        try:
            content = await body.read(self._context.config.body_timeout)
            if not await _run_while_connected(self._app, scope, content, body.receive, send):
                scope["kiln.record"].outcome = "client_gone"
        finally:
            self._context.limiter.leave(caller)


class _Body:
    """A request's body, as it arrives."""

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        self.receive = receive
        self._limit = limit
        self._headers = dict(scope["headers"])
        self._more = scope["method"] == "POST"
        self._late = False

    async def read(self, seconds: float) -> bytes:
        """All of it. Raises ApiError 408 and 413, and _ClientGoneError."""
        if self._declared > self._limit:
            raise self._too_large()
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while self._more:
                    content += await self._next()
                    if len(content) > self._limit:
                        raise self._too_large()
        except TimeoutError as error:
            self._late = True
            raise ApiError(408, f"the body was not whole after {seconds:g} s; send it faster") from error
        return bytes(content)

    async def discard(self) -> bool:
        """Read on without keeping anything, within reason; whether that reached the end."""
        hopeless = self._late or b"expect" in self._headers or self._declared > 2 * self._limit
        left = 0 if hopeless else 2 * self._limit
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while self._more and left > 0:
                    left -= len(await self._next())
        return not self._more

    async def _next(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        self._more = message.get("more_body", False)
        return message.get("body", b"")

    @property
    def _declared(self) -> int:
        """Bytes that the client announces; the protocol checks that this is a number and holds."""
        return int(self._headers.get(b"content-length", b"0"))

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._limit} bytes, the limit; send less at a time", code="body_too_large"
        )


async def _run_while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
    """Run the app on a body read before; cancel it, and return False, when the client goes away."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.create_task(_disconnect(receive))

    async def replay() -> Message:
        return unread.pop() if unread else await asyncio.shield(gone)

    work = asyncio.ensure_future(app(scope, replay, send))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return True
        return False
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})


async def _disconnect(receive: Receive) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message
