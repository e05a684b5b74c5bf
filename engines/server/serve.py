"""Serves the application on a socket until a signal ends it, in order.

On SIGTERM or SIGINT the server takes nothing new: /health/ready and every POST answer 503. What runs has
`drain_timeout` seconds to finish; what is left then is cancelled, which is its outcome. A second signal shortens that.
The process ends with code 0.
"""

import asyncio
import math
import socket
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn

from engines.server.app import create_app
from engines.server.auth import KeyRing
from engines.server.config import ServerConfig
from engines.server.connection import protocol_with_limits
from engines.server.context import ServerContext
from engines.server.encoder import EmbeddingConfig
from engines.server.served import ServedEngine
from plugins.errors import KilnError

_LAST_SECONDS = 5
"""For the answers of requests that were cancelled to reach their clients."""

_BACKLOG = 2048


async def serve(
    engines: Mapping[str, ServedEngine],
    listener: socket.socket,
    config: ServerConfig,
    keys: KeyRing | None = None,
    embeddings: Mapping[str, EmbeddingConfig] | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve engines, which stay the caller's, on a listening socket until a signal comes."""
    await server_for(engines, config, keys, embeddings, on_ready).serve([listener])


def server_for(
    engines: Mapping[str, ServedEngine],
    config: ServerConfig,
    keys: KeyRing | None = None,
    embeddings: Mapping[str, EmbeddingConfig] | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> "DrainingServer":
    """A server that is not started yet."""
    app = create_app(engines, config, keys, embeddings)
    settings = uvicorn.Config(
        app,
        http=protocol_with_limits(config),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(config.keep_alive),
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    return DrainingServer(settings, app.state.context, on_ready)


class DrainingServer(uvicorn.Server):
    """Ends as the module says. `request_end` does what a signal does."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.context = context
        self._on_ready = on_ready
        self._hurry = asyncio.Event()

    def request_end(self) -> None:
        """Begin to end; the second time, do not wait for what runs. On the event loop's thread only."""
        if self.should_exit:
            self._hurry.set()
        self.context.draining = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Runs between two instructions of this thread, maybe while the loop sleeps. uvicorn would note the signal in
        # order to raise it again at the end, which would end the process by it instead of with code 0.
        self._loop.call_soon_threadsafe(self.request_end)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.context.load()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def main_loop(self) -> None:
        await super().main_loop()
        await self._drain()

    async def _drain(self) -> None:
        """Let requests finish while the socket still listens, so that new ones are told to go elsewhere."""
        self.context.draining = True
        idle = asyncio.create_task(self.context.limiter.wait_idle())
        hurry = asyncio.create_task(self._hurry.wait())
        seconds = self.context.config.drain_timeout
        await asyncio.wait({idle, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for record in self.context.active:
            record.cancel()
        await asyncio.wait({idle}, timeout=_LAST_SECONDS)
        for task in (idle, hurry):
            task.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, port 0: on any port. Who connects before it is served waits. Raises KilnError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise KilnError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
