"""Time limits of connections, which uvicorn has only for those that are idle between requests.

A connection is cut that does not send the headers of a request in time, however slowly it goes on sending, and one
that takes nothing of what waits for it. The request of a connection that is cut ends like one whose client went away.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.server.config import ServerConfig


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with both limits; `limits` is set by `protocol_with_limits`."""

    limits: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers = _Timer()
        self._stall = _Timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._headers.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start(self.loop, self.limits.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._headers.stop()
        self._stall.stop()

    def _await_headers(self) -> None:
        self._headers.start(self.loop, self.limits.header_timeout, self.transport.abort)


def protocol_with_limits(limits: ServerConfig) -> type[TimedProtocol]:
    """The class that uvicorn makes for each connection."""
    return type("LimitedProtocol", (TimedProtocol,), {"limits": limits})


class _Timer:
    """One action that may be ahead."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]) -> None:
        """Without effect when it runs already."""
        if self._handle is None:
            self._handle = loop.call_later(seconds, action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
