"""The HTTP side on Ray: the application of `engines.server` over the cluster's replicas.

Serve's proxies carry HTTP; keys, limits, tokenising and the wording of answers are the server's own. Every replica of
it comes by the steward each second, and goes on as before where the steward is away.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

from engines.runtime.info import EngineInfo
from pipeline.deploy.bundles import BundleSource
from pipeline.deploy.options import DeployOptions
from pipeline.deploy.remote_engine import RemoteEngine
from pipeline.deploy.rollout import Traffic
from pipeline.deploy.standing import DEPLOYMENT
from pipeline.deploy.steward import SECONDS, steward_of
from pipeline.ray_cluster import serve_module

_INFO_SECONDS = 5.0
_LOG = logging.getLogger("kiln.deploy")


class Ingress:
    """Made by Serve, which asks it for the ASGI application."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, options: DeployOptions, source: BundleSource) -> None:  # type: ignore[misc]
        """`source` is of the first version; later ones have the same tokenizer. Raises KilnError."""
        from engines.server.app import create_app  # only nodes with FastAPI make one, every `kiln` imports this module

        self._options = options
        self._traffic: Traffic | None = await steward_of(options.app).exchange.remote(None, {})
        assert self._traffic is not None, "the traffic is directed before the HTTP side starts"
        tokenizer = await asyncio.to_thread(source.bring_tokenizer)
        self._tokenizer = None if tokenizer is None else str(tokenizer)
        self._described = self._traffic.sides[0].app
        self._engine = RemoteEngine(await self._info(self._described), _handle, options.http.retries)
        self._engine.direct(self._traffic)
        http = options.http
        self._app = create_app({http.model: self._engine}, http.config, http.keys, http.embeddings)
        await self._app.state.context.load()  # or the first request would wait for the tokenizer
        self._following = asyncio.create_task(self._follow())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def deployed(self) -> tuple[DeployOptions, Traffic | None]:
        """What it was deployed with, and what it does now."""
        return self._options, self._traffic

    async def _follow(self) -> None:
        while True:
            try:
                figures = self._engine.take_figures()
                found = await steward_of(self._options.app).exchange.remote(self._traffic, figures)
                if found is not None and found != self._traffic:
                    self._engine.direct(found)
                    self._traffic = found
                await self._describe()
            except Exception as error:
                _LOG.warning("the steward of %s cannot be asked: %s", self._options.app, error)
            await asyncio.sleep(SECONDS)

    async def _describe(self) -> None:
        """What the engine says of itself is what the version that is trusted most says."""
        assert self._traffic is not None
        trusted = self._traffic.sides[0].app
        if trusted != self._described:
            self._engine.info = await asyncio.wait_for(self._info(trusted), _INFO_SECONDS)
            self._described = trusted

    async def _info(self, app: str) -> EngineInfo:
        """Of a version; the tokenizer is the one that is here."""
        return replace(await _handle(app).info.remote(), tokenizer=self._tokenizer)


def _handle(app: str) -> Any:
    serve = serve_module()

    return serve.get_deployment_handle(DEPLOYMENT, app_name=app)
