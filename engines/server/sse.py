"""Server-sent events: chunks of an answer as they come, an `error` event when it fails, `[DONE]` at the end.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from engines.server.errors import ApiError, api_error

logger = logging.getLogger("kiln.server")

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come. They end with `[DONE]`, also after an error, which is the last event then."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Mapping[str, Any], None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": _data(event), "more_body": True})
                    await asyncio.sleep(0)  # neither of these waits while there are events: let others have a turn
            except Exception as error:
                answer = self._answer(scope, error)
                await send({"type": "http.response.body", "body": answer, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _answer(self, scope: Scope, error: Exception) -> bytes:
        record = scope["kiln.record"]
        known = api_error(error)
        if known is None:
            logger.exception("request %s failed", record.id)
            known = ApiError(500, f"the server failed; its log says more about the request {record.id}")
        record.outcome = known.code or "error"
        return b"event: error\n" + _data(known.body(scope["path"]))


def _data(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
