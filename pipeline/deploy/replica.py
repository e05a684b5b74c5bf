"""One engine of the cluster: a Serve replica, with the engine in a supervised process of its own beside it.

So a crash or a hang of the engine is noticed, says how it came, and is mended within the replica (`EngineProcess`);
the loss of the replica or its node is noticed by Ray, which starts another one. Both end what was running, and the HTTP
side (`remote_engine`) sends again what it may.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from engines.runtime.info import EngineInfo
from engines.runtime.request import Request, TokenChunk
from engines.runtime.sequence import Lane
from engines.server.engine_process import EngineProcess
from engines.server.load_figures import reading_from_families
from engines.server.messages import portable
from engines.server.options import EngineOptions
from engines.server.served import EngineDiedError, TokenStream
from pipeline.deploy.bundles import BundleSource, manifest_in
from pipeline.deploy.request_router import BLOCKS, PLACES
from pipeline.deploy.scaling import BLOCK_USE, WANTED, block_use
from pipeline.deploy.scaling import PLACES as PLACES_OF_REPLICA
from pipeline.deploy.steward import size_told
from pipeline.deploy.wire import Accepted, Chunks, Refused, Route
from pipeline.ray_cluster import serve_module

Message = Accepted | Refused | Chunks
_Item = tuple[int, TokenChunk | Exception]


class EngineReplica:
    """Made by Serve; every method runs on its one event loop."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, source: BundleSource, options: EngineOptions, name: str, steward: str) -> None:  # type: ignore[misc]
        """Raises KilnError where the bundle cannot be had or opened here."""
        serve = serve_module()

        context = serve.get_replica_context()
        self._id, self._app, self._steward = context.replica_id.unique_id, context.app_name, steward
        path = await asyncio.to_thread(source.bring)
        spec = options.spec(path, manifest_in(path), name)
        self._places = 1 if spec.config is None else spec.config.max_running
        self._engine = await EngineProcess.start(spec)

    async def info(self) -> EngineInfo:
        return self._engine.info

    async def generate(self, request: Request, route: Route) -> AsyncIterator[Message]:
        """Accepted, then chunks until every answer has ended; or Refused. Cancelled, it ends the answers."""
        del route  # the router's
        try:
            streams = await self._engine.submit(request)
        except Exception as error:
            yield Refused(self._id, portable(error))
            return
        try:
            yield Accepted(self._id)
            async for items in _batches(streams, request.whole):
                yield Chunks(items)
        finally:
            for stream in streams:
                stream.cancel()

    async def infer(
        self, inputs: Mapping[str, NDArray], lane: Lane, timeout: float | None, route: Route
    ) -> dict[str, NDArray] | Refused:
        del route
        try:
            return await self._engine.infer(inputs, lane=lane, timeout=timeout)
        except Exception as error:
            return Refused(self._id, portable(error))

    async def metrics(self) -> list[Metric]:
        """The engine's families, each sample with this replica's name."""
        families = await self._engine.metrics()
        for family in families:
            family.samples = [each._replace(labels={**each.labels, "replica": self._id}) for each in family.samples]
        return families

    # What Serve asks, by its own names

    async def check_health(self) -> None:
        """Raises where the engine is away for good: Serve then replaces this replica."""
        if self._engine.given_up is not None:
            raise EngineDiedError(self._engine.given_up)

    async def record_replica_metadata(self) -> dict[str, int]:
        return {PLACES: self._places, BLOCKS: self._engine.info.num_blocks}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        gauges = reading_from_families(0.0, await self._engine.metrics()).gauges
        held, running, *waiting = (
            gauges.get(name, 0.0) for name in ("blocks_held", "running", "waiting_interactive", "waiting_batch")
        )
        use = block_use(held, self._engine.info.num_blocks, running, sum(waiting))
        wanted = 0.0
        with suppress(Exception):  # whatever keeps us from it, the load decides
            wanted = await size_told(self._steward, self._app)
        return {PLACES_OF_REPLICA: self._places, BLOCK_USE: use, WANTED: wanted}


async def _batches(streams: Sequence[TokenStream], whole: bool) -> AsyncIterator[tuple[_Item, ...]]:
    """What came about since the last batch, so that many tokens travel as one message; `whole`: all at the end."""
    queue: asyncio.Queue[_Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(stream, choice, queue)) for choice, stream in enumerate(streams)]
    left, kept = len(streams), list[_Item]()
    try:
        while left:
            fresh = [await queue.get()]
            while not queue.empty():
                fresh.append(queue.get_nowait())
            left -= sum(isinstance(item, Exception) or item.finish_reason is not None for _, item in fresh)
            kept += fresh
            if not (whole and left):
                yield tuple(_joined(kept))
                kept = []
    finally:
        for task in tasks:
            task.cancel()


async def _forward(stream: TokenStream, choice: int, queue: "asyncio.Queue[_Item]") -> None:
    try:
        async for chunk in stream:
            queue.put_nowait((choice, chunk))
    except Exception as error:
        queue.put_nowait((choice, portable(error)))


def _joined(items: Sequence[_Item]) -> list[_Item]:
    """Chunks of one answer become one; an error is always its last item."""
    parts: dict[int, list[TokenChunk]] = {}
    errors: list[_Item] = []
    for choice, item in items:
        if isinstance(item, TokenChunk):
            parts.setdefault(choice, []).append(item)
        else:
            errors.append((choice, item))
    joined: list[_Item] = [
        (
            choice,
            TokenChunk(
                tuple(token for chunk in chunks for token in chunk.token_ids),
                "".join(chunk.text for chunk in chunks),
                chunks[-1].finish_reason,
                tuple(entry for chunk in chunks for entry in chunk.logprobs),
            ),
        )
        for choice, chunks in parts.items()
    ]
    return joined + errors
