"""`RemoteEngine`: the replicas of a cluster as one engine of the HTTP side, with retries where they lose nothing.

A request that had no output when its replica failed is sent to another one, which nobody notices but by the time. What
had begun fails with EngineDiedError, in a stream as its last event. An answer that is shown as a whole comes in one
message, so it has no output until then and is always sent again. Serve chooses the replica (`request_router`); which
version is asked first follows the traffic's shares, and what failed goes to the version that is trusted most.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from engines.runtime.info import EngineInfo
from engines.runtime.prefix_cache import names_of_prompt
from engines.runtime.request import Request
from engines.runtime.scheduler import QueueFullError
from engines.runtime.sequence import Lane, blocks_for
from engines.server.served import EngineDiedError, TokenStream
from pipeline.deploy.figures import Figures
from pipeline.deploy.remote_call import GenerateCall, ReplicaLostError, translated
from pipeline.deploy.rollout import Traffic
from pipeline.deploy.wire import Refused, Route
from plugins.errors import KilnError

_LOG = logging.getLogger("kiln.deploy")
_FIRST_PAUSE = 0.05
_METRICS_SECONDS = 2.0


class _Version:
    """A version's handle, its share of the traffic, and how much of that it was given."""

    def __init__(self, app: str, handle: Any) -> None:
        self.app, self.handle = app, handle
        self.share, self.given = 0.0, 0
        self.figures = Figures()


class RemoteEngine:
    """Implements `ServedEngine`; to be used on one event loop. `handle_of` gives Serve's handle of a version."""

    def __init__(self, info: EngineInfo, handle_of: Callable[[str], Any], retries: int) -> None:
        self.info = info
        self._handle_of, self._retries = handle_of, retries
        self._versions: dict[str, _Version] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    def direct(self, traffic: Traffic) -> None:
        """Which versions get which shares from now on."""
        before = self._versions
        self._versions = {
            side.app: before.get(side.app) or _Version(side.app, self._handle_of(side.app)) for side in traffic.sides
        }
        for side in traffic.sides:
            version = self._versions[side.app]
            version.share, version.given = side.share, 0

    def take_figures(self) -> dict[str, Figures]:
        """What requests met since the last time, by version."""
        found = {app: version.figures for app, version in self._versions.items() if version.figures.requests}
        for app in found:
            self._versions[app].figures = Figures()
        return found

    @property
    def ready(self) -> bool:
        return bool(self._versions) and not self._closed

    async def submit(self, request: Request) -> list[TokenStream]:
        route, deadline = self._route(request), _deadline(request.timeout)
        call = GenerateCall(request, route, deadline)

        async def once(version: _Version, avoid: frozenset[str]) -> int | None:
            tokens = await call.once(version.handle, avoid)
            return None if call.failed else tokens

        async def run() -> None:
            try:
                await self._persist(once, deadline)
            except Exception as error:
                call.fail(error)

        task = asyncio.create_task(run())
        self._calls.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._calls.discard)
        call.on_cancelled = task.cancel
        try:
            await asyncio.shield(call.accepted)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return list(call.streams)

    async def infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> dict[str, NDArray]:
        deadline, found = _deadline(timeout), dict[str, NDArray]()

        async def once(version: _Version, avoid: frozenset[str]) -> int:
            try:
                answer = await version.handle.infer.remote(inputs, lane, _left(deadline), Route(avoid=avoid))
            except Exception as error:
                raise translated(error, "") from error
            if isinstance(answer, Refused):
                raise _refusal(answer)
            found.update(answer)
            return 1

        await self._persist(once, deadline)
        return found

    async def metrics(self) -> list[Metric]:
        """Of every replica that says them in time."""
        return [family for version in list(self._versions.values()) for family in await _metrics(version)]

    async def close(self) -> None:
        self._closed = True
        for task in list(self._calls):
            task.cancel()

    def _route(self, request: Request) -> Route:
        size, prompt = self.info.block_size, request.prompt
        assert not isinstance(prompt, str), "the HTTP side gives token ids"
        names = names_of_prompt(prompt, size, request.tenant)
        most, limit = request.sampling.max_tokens, self.info.max_length
        whole = limit if most is None else min(limit, len(prompt) + most)
        return Route(tuple(names), blocks_for(whole, size) - len(names))

    async def _persist(self, once: "_Once", deadline: float | None) -> None:
        """Try, and where a replica is lost before it gave anything try others.

        `once` gives the tokens of the answers, None where the engine failed them. What a request is refused for its own
        sake says nothing about a version.
        """
        avoid: set[str] = set()
        for attempt in range(self._retries + 1):
            version, start = self._pick(attempt), time.monotonic()
            try:
                _left(deadline)
                tokens = await once(version, frozenset(avoid))
                if tokens is None:
                    version.figures.failed()
                else:
                    version.figures.answered(time.monotonic() - start, tokens)
                return
            except ReplicaLostError as lost:
                version.figures.failed()
                avoid.add(lost.replica)
                if attempt == self._retries:
                    raise
                _LOG.warning("%s; it had given nothing and is sent again", lost)
                await asyncio.sleep(_FIRST_PAUSE * 2**attempt)
            except Exception as error:
                if isinstance(error, EngineDiedError) or not isinstance(
                    error, KilnError | TimeoutError | QueueFullError
                ):
                    version.figures.failed()
                raise

    def _pick(self, attempt: int) -> _Version:
        """At first who is furthest behind its share; then the first one, which is trusted most."""
        if not self._versions:
            raise EngineDiedError(f"no version of {self.info.name} serves yet; send the request again in a moment")
        versions = list(self._versions.values())
        if attempt:
            return versions[0]
        total = sum(version.given for version in versions) + 1
        chosen = max(versions, key=lambda version: version.share * total - version.given)
        chosen.given += 1
        return chosen


_Once = Callable[[_Version, frozenset[str]], Awaitable[int | None]]


def _refusal(answer: Refused) -> Exception:
    if isinstance(answer.error, EngineDiedError):
        return ReplicaLostError(str(answer.error), answer.replica)
    return answer.error


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    """Seconds. Raises TimeoutError where none are left."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request's time limit passed before a replica could answer; try again later")
    return left


async def _metrics(version: _Version) -> list[Metric]:
    try:
        response = version.handle.broadcast("metrics")
        found = await response.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
    except Exception as error:  # replicas come and go
        _LOG.info("no metrics of %s: %s", version.app, error)
        return []
    return [family for families in found if isinstance(families, list) for family in families]
