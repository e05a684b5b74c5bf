"""`/metrics` in Prometheus' text format, or OpenMetrics where the client asks for it: all engines and the HTTP side.

`CountRequests` goes around everything else, so that refused requests count too. A request is named by its route's
template, never by its path, so that no client can make up series.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.server.context import Context
from engines.server.served import ServedEngine

_CLIENT_GONE = 499
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class HttpMetrics:
    """The HTTP side's own families, and those of the process that serves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kiln_http_requests",
            "HTTP requests by route and status; 499: the client went away",
            ["route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kiln_http_request_seconds",
            "From the headers to the end of the answer",
            ["route"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.in_flight = 0
        in_flight = Gauge("kiln_http_in_flight", "HTTP requests in the works", registry=self.registry)
        in_flight.set_function(lambda: self.in_flight)
        ProcessCollector(registry=self.registry)

    def finished(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def families(self) -> list[Metric]:
        return list(self.registry.collect())


class CountRequests:
    """ASGI middleware: `app.add_middleware(CountRequests, http=HttpMetrics())`, the last to be added."""

    def __init__(self, app: ASGIApp, http: HttpMetrics) -> None:
        self._app = app
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), _CLIENT_GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._http.in_flight += 1
        try:
            await self._app(scope, receive, watch)
        finally:
            self._http.in_flight -= 1
            route = getattr(scope.get("route"), "path", "none")
            self._http.finished(route, status, time.monotonic() - start)


def metrics_router(http: HttpMetrics) -> APIRouter:
    """The route; `http` is what the app counts its requests with."""
    router = APIRouter(tags=["operation"])

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request, context: Context) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        families = merged([*await snapshots_of(context.engines.values()), http.families()])
        text = await asyncio.to_thread(encode, _Families(families))
        return Response(text, headers={"Content-Type": content_type})

    return router


async def snapshots_of(engines: Iterable[ServedEngine]) -> list[list[Metric]]:
    """Every engine's families."""
    return await asyncio.gather(*(engine.metrics() for engine in engines))


def merged(groups: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Families of several sources, each family once with the samples of all, in the order in which they appear."""
    families: dict[str, Metric] = {}
    for family in (family for group in groups for family in group):
        if family.name not in families:
            families[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
        # When each was created is worth no series of its own.
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        families[family.name].samples.extend(samples)
    return list(families.values())


class _Families(Collector):
    """What the encoders take in place of a registry."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
