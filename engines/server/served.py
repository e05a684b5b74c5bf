"""What the HTTP side asks of an engine, wherever it runs, and the engine in this very process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.request import Request, TokenChunk
from engines.runtime.sequence import Lane
from plugins.errors import KilnError


class EngineDiedError(KilnError):
    """The engine's process ended, or hung and was killed: the request may be sent again when it has been restarted."""


class TokenStream(Protocol):
    """The chunks of one answer, for one reader.

    Raises RequestError, after the chunks before it, when the request failed; EngineDiedError when its engine died.
    """

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...

    def cancel(self) -> None:
        """Ask the engine to end the request; its last chunk then has the finish reason `cancelled`."""
        ...


class ServedEngine(Protocol):
    """One engine behind the server."""

    info: EngineInfo

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        ...

    async def submit(self, request: Request) -> list[TokenStream]:
        """Queue a request and return one stream for each of its `sampling.n` answers.

        Raises KilnError for a request that can never run, QueueFullError when too many wait, EngineDiedError while the
        engine's process is being restarted.
        """
        ...

    async def infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> dict[str, NDArray]:
        """Run a model without a KV cache. Raises as `submit`, and TimeoutError."""
        ...

    async def metrics(self) -> list[Metric]:
        """A snapshot; empty while the engine's process is away."""
        ...

    async def close(self) -> None:
        """End what is outstanding and free everything."""
        ...


class LocalEngine:
    """An `Engine` of this process, which it owns from now on. Implements `ServedEngine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = engine.info

    @property
    def ready(self) -> bool:
        return not self._engine.closed

    async def submit(self, request: Request) -> list[TokenStream]:
        return list(self._engine.submit_choices(request))

    async def infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> dict[str, NDArray]:
        return await asyncio.wrap_future(self._engine.submit_infer(inputs, lane=lane, timeout=timeout))

    async def metrics(self) -> list[Metric]:
        return self._engine.metrics.families()

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)
