"""The outermost layer: every request has an id, one log line, an answer even where the server fails, and an end.

The line names method, path without its query, status, time and tokens; never a body, a header or a key. Status 499 is
one whose client went away. What the engine works on for a request is cancelled when the request ends, however it does.
"""

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.server.context import RequestRecord, ServerContext
from engines.server.errors import ApiError

logger = logging.getLogger("kiln.server")

CLIENT_GONE = 499
_ID = re.compile(rb"[\w.-]{1,64}")


class RequestLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        record = RequestRecord(given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope["kiln.record"] = record
        self._context.active.add(record)
        start, status = time.monotonic(), CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", record.id)
            if status != CLIENT_GONE:
                raise  # the answer has begun: cutting the connection is what is left
            error = ApiError(500, f"the server failed; its log says more about the request {record.id}")
            await error.response(scope["path"])(scope, receive, send_with_id)
        finally:
            record.cancel()
            self._context.active.discard(record)
            self._log(scope, record, status, time.monotonic() - start)

    def _log(self, scope: Scope, record: RequestRecord, status: int, seconds: float) -> None:
        path = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
        logger.info(
            "%s %s %d %.0fms model=%s prompt=%d generated=%d outcome=%s key=%s id=%s",
            scope["method"],
            path.partition(b"?")[0][:200].decode("ascii", "backslashreplace"),
            status,
            seconds * 1e3,
            record.model,
            record.prompt_tokens,
            record.generated_tokens,
            record.outcome,
            record.key,
            record.id,
        )
