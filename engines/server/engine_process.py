"""`EngineProcess`: an engine in a process of its own, watched, and started again when it dies.

So tokenising for HTTP, JSON and sockets run while the engine computes, and a crash of the engine takes nobody else
with it. What happens when the process ends by itself:

1. Everything outstanding fails with EngineDiedError, which says how the process ended. `ready` is false, and new
   requests are refused at once.
2. After a pause, which grows from failure to failure, the bundle is opened again. A process that has lasted for
   `steady_seconds` begins a new count.
3. After `most_failures` in a row the engine stays away, and every request says so.

A process that answers no pings, or has work and gets nothing done for `hang_seconds`, is killed, and then the same
happens. The engine's own counters begin at 0 again, which Prometheus' rate() expects of counters; restarts are counted
here.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric

from engines.runtime.info import EngineInfo
from engines.runtime.request import Request
from engines.runtime.sequence import Lane
from engines.server.engine_link import EngineLink
from engines.server.messages import EngineSpec
from engines.server.served import EngineDiedError, TokenStream
from plugins.errors import KilnError

_LOG = logging.getLogger("kiln.engine")


@dataclass(frozen=True)
class SupervisionConfig:
    """When an engine's process is given up, and when it is started again. Raises KilnError for what is not positive."""

    open_seconds: float = 600.0
    """Most that opening the bundle may take."""
    ping_seconds: float = 1.0
    """Between two looks at whether it gets on."""
    hang_seconds: float = 120.0
    """Without a sign of life, or of progress with its requests, it is killed. A single step may take long."""
    close_seconds: float = 10.0
    """That it has to end when asked to."""
    metrics_seconds: float = 2.0
    """That it has to say its metrics."""
    first_pause: float = 0.5
    """Before the first restart, in seconds."""
    pause_factor: float = 2.0
    """By which each further failure in a row lengthens the pause."""
    longest_pause: float = 30.0
    most_failures: int = 8
    """In a row; then it is not started any more."""
    steady_seconds: float = 60.0
    """After which a process that dies counts as the first failure."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not (value := getattr(self, field.name)) > 0:
                raise KilnError(f"{field.name} is {value}; expected a number above 0")

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.first_pause * self.pause_factor ** (failures - 1), self.longest_pause)


class EngineProcess:
    """Made by `start`; implements `ServedEngine`. To be used on the event loop that started it."""

    def __init__(self, spec: EngineSpec, config: SupervisionConfig, link: EngineLink, info: EngineInfo) -> None:
        self.info = info
        self._spec = spec
        self._config = config
        self._link: EngineLink | None = link
        self._away = ""  # why there is no link
        self._closed = False
        self._registry = CollectorRegistry()
        restarts = Counter(
            "kiln_engine_restarts", "Starts of the engine's process after the first", ["model"], registry=self._registry
        )
        up = Gauge("kiln_engine_up", "Whether the engine's process takes requests", ["model"], registry=self._registry)
        up.labels(info.name).set_function(lambda: self.ready)
        self._restarts = restarts.labels(info.name)
        self._supervising = asyncio.create_task(self._supervise(link), name=f"kiln-supervise-{info.name}")

    @classmethod
    async def start(cls, spec: EngineSpec, config: SupervisionConfig | None = None) -> "EngineProcess":
        """Returns when the engine is ready. Raises KilnError when the bundle cannot be opened."""
        config = config or SupervisionConfig()
        link, info = await _opened(spec, config)
        return cls(spec, config, link, info)

    @property
    def ready(self) -> bool:
        return self._link is not None and not self._closed

    @property
    def given_up(self) -> str | None:
        """Why it is not started any more; None while it runs or will be started again."""
        return self._away if self._supervising.done() and not self._closed else None

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return None if self._link is None else self._link.pid

    async def submit(self, request: Request) -> list[TokenStream]:
        return list(await self._require_link().submit(request))

    async def infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> dict[str, NDArray]:
        return await self._require_link().infer(inputs, lane, timeout)

    async def metrics(self) -> list[Metric]:
        """The engine's, unless it is away or takes too long, and the supervisor's."""
        own = list(self._registry.collect())
        if self._link is None:
            return own
        try:
            async with asyncio.timeout(self._config.metrics_seconds):
                return [*await self._link.metrics(), *own]
        except (TimeoutError, EngineDiedError):
            return own

    async def close(self) -> None:
        self._closed = True
        if self._link is None:
            self._supervising.cancel()  # it pauses, or opens the bundle
        else:
            await self._link.close(self._config.close_seconds)
        await asyncio.wait([self._supervising])

    def _require_link(self) -> EngineLink:
        if self._closed:
            raise EngineDiedError(f"the engine of {self.info.name} is closed, because the server ends")
        if self._link is None:
            raise EngineDiedError(self._away)
        return self._link

    async def _supervise(self, link: EngineLink) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            how = await self._watched(link)
            self._link = None
            if self._closed:
                link.fail(f"the engine of {self.info.name} was closed, because the server ends")
                return
            failures = 1 if time.monotonic() - started >= self._config.steady_seconds else failures + 1
            self._note_failure(failures, f"its process {link.pid} {how}")
            link.fail(self._away)
            while self._link is None:
                if failures >= self._config.most_failures:
                    return
                await asyncio.sleep(self._config.pause(failures))
                try:
                    self._link, self.info = await _opened(self._spec, self._config)
                except (KilnError, RuntimeError, OSError) as error:
                    failures += 1
                    self._note_failure(failures, f"it could not be opened: {error}")
            link = self._link
            self._restarts.inc()
            _LOG.warning("the engine of %s is back, as process %d", self.info.name, link.pid)

    def _note_failure(self, failures: int, what: str) -> None:
        """Log it, and word what requests are told until the engine is back."""
        name = self.info.name
        if failures >= self._config.most_failures:
            next_ = f"after {failures} failures in a row it is not started again: see the log, then restart the server"
        else:
            next_ = "it is being restarted: send the request again in a moment"
        self._away = f"the engine of {name} died: {what}; {next_}"
        _LOG.error("%s (failure %d in a row)", self._away, failures)

    async def _watched(self, link: EngineLink) -> str:
        """How the process ended. Meanwhile it is killed when it hangs."""
        watching = asyncio.create_task(self._kill_when_it_hangs(link))
        try:
            return await link.ended()
        finally:
            watching.cancel()

    async def _kill_when_it_hangs(self, link: EngineLink) -> None:
        limit = self._config.hang_seconds
        progress, since = 0.0, time.monotonic()
        while True:
            try:
                async with asyncio.timeout(limit):
                    pong = await link.ping()
            except TimeoutError:
                link.kill(f"it gave no sign of life for {limit:g} s")
                return
            except (KilnError, RuntimeError) as error:
                link.kill(f"it cannot say how it is: {error}")
                return
            if not pong.outstanding or pong.progress != progress:
                progress, since = pong.progress, time.monotonic()
            elif time.monotonic() - since > limit:
                link.kill(f"none of its {pong.outstanding} requests got on for {limit:g} s")
                return
            await asyncio.sleep(self._config.ping_seconds)


async def _opened(spec: EngineSpec, config: SupervisionConfig) -> tuple[EngineLink, EngineInfo]:
    """A process that has opened the bundle. Raises KilnError, and then there is no process."""
    begun = time.monotonic()
    link = await EngineLink.start(spec)
    opening = asyncio.create_task(link.open(spec, config.close_seconds))
    ending = asyncio.create_task(link.ended())
    try:
        await asyncio.wait([opening, ending], timeout=config.open_seconds, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            info = opening.result()
            _LOG.info("%s is open after %.1f s, in process %d", spec.path, time.monotonic() - begun, link.pid)
            return link, info
        if ending.done():
            raise EngineDiedError(f"{spec.path} was not opened: the engine's process {ending.result()}")
        raise KilnError(
            f"{spec.path} was not opened within {config.open_seconds:g} s; raise open_seconds, or see the log"
        )
    except BaseException:
        opening.cancel()
        link.kill("it was not wanted any more")
        await link.ended()
        raise
    finally:
        ending.cancel()
