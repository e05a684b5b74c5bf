"""`/`: a page that shows load, latencies and cache use live; `/status.json`: the figures that it asks for every second.

The page is one document: its style and script are put into it here, so that it needs no other request and a strict
content security policy names both by their digests. Figures come from `engines.server.load_figures`.
"""

import asyncio
import base64
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import HTMLResponse

from engines.server.context import Context, ServerContext
from engines.server.load_figures import LoadHistory
from engines.server.metrics_route import snapshots_of
from engines.server.served import ServedEngine

_INTERVAL = 1.0
"""Seconds between two snapshots."""


class LoadMonitor:
    """Takes a snapshot of every engine once a second while the server runs, so that a page shows a minute at once."""

    def __init__(self) -> None:
        self._histories: defaultdict[str, LoadHistory] = defaultdict(LoadHistory)
        self._started = time.monotonic()
        self._taken: float | None = None
        self._taking = asyncio.Lock()
        self._figures: dict[str, Any] | None = None  # of the last snapshot

    async def run(self, context: ServerContext) -> None:
        """Until cancelled."""
        while True:
            await self._take(context)
            await asyncio.sleep(_INTERVAL)

    async def figures(self, context: ServerContext) -> dict[str, Any]:
        """The answer of `/status.json`: of the last snapshot, or of a new one where nothing takes them."""
        if self._taken is None or time.monotonic() - self._taken > 2 * _INTERVAL:
            await self._take(context)
        if self._figures is None:
            self._figures = {
                "uptime_seconds": time.monotonic() - self._started,
                "draining": context.draining,
                "requests_running": context.limiter.running,
                "models": [self._model(name, engine) for name, engine in context.engines.items()],
            }
        return self._figures

    async def _take(self, context: ServerContext) -> None:
        async with self._taking:
            snapshots = await snapshots_of(context.engines.values())
            self._taken = time.monotonic()
            for name, families in zip(context.engines, snapshots, strict=True):
                self._histories[name].add(self._taken, families)
            self._figures = None

    def _model(self, name: str, engine: ServedEngine) -> dict[str, Any]:
        info = engine.info
        return {
            "name": name,
            "kind": info.kind,
            "source": info.source,
            "sku": info.sku,
            "ready": engine.ready,
            **self._histories[name].figures(),
        }


def status_router() -> APIRouter:
    """Both routes, and the task that takes snapshots while the app runs."""
    monitor = LoadMonitor()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(monitor.run(app.state.context))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    router = APIRouter(tags=["operation"], lifespan=lifespan)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        document, policy = status_page()
        return HTMLResponse(document, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

    @router.get("/status.json")
    async def status(context: Context, response: Response) -> dict[str, Any]:
        response.headers["Cache-Control"] = "no-store"
        return await monitor.figures(context)

    return router


@cache
def status_page() -> tuple[str, str]:
    """The document, and the content security policy that lets only its own style and script run."""
    folder = files("engines.server") / "static"
    page, style, script = ((folder / f"status.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    document = page.replace("/* status.css */", style).replace("/* status.js */", script)
    policy = {
        "default-src": "'none'",
        "style-src": _digest(style),
        "script-src": _digest(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return document, "; ".join(f"{name} {value}" for name, value in policy.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
