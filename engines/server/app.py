"""The HTTP application over engines: routes, and what stands before and behind them. Serving it is `serve`'s work."""

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engines.runtime.scheduler import QueueFullError
from engines.server.auth import KeyRing
from engines.server.chat import chat_router
from engines.server.completions import completions_router
from engines.server.config import ServerConfig
from engines.server.context import ServerContext
from engines.server.embeddings import embeddings_router
from engines.server.encoder import EmbeddingConfig
from engines.server.errors import ApiError, api_error
from engines.server.gate import Gate
from engines.server.kserve import kserve_router
from engines.server.metrics_route import CountRequests, HttpMetrics, metrics_router
from engines.server.models import health_router, models_router
from engines.server.request_log import RequestLog
from engines.server.served import ServedEngine
from engines.server.status_page import status_router
from plugins.errors import KilnError


def create_app(
    engines: Mapping[str, ServedEngine],
    config: ServerConfig | None = None,
    keys: KeyRing | None = None,
    embeddings: Mapping[str, EmbeddingConfig] | None = None,
) -> FastAPI:
    """An application over engines, by the names under which they are served; it does not own them.

    Its `state.context` is the ServerContext. Without `keys` everybody who reaches it may use it. `embeddings` says, by
    name, how encoders pool where their graphs do not tell.
    """
    context = ServerContext(engines, config or ServerConfig(), keys)
    app = FastAPI(
        title="Kiln",
        summary="Compiled models over HTTP: the OpenAI API, the KServe v2 protocol, health and metrics",
        docs_url=None,  # they would load programs from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    http = HttpMetrics()
    for router in (
        completions_router(),
        chat_router(),
        embeddings_router(embeddings),
        models_router(),
        kserve_router(),
        health_router(),
        metrics_router(http),
        status_router(),
    ):
        app.include_router(router)
    app.add_middleware(Gate, context=context)
    app.add_middleware(RequestLog, context=context)
    app.add_middleware(CountRequests, http=http)  # the last one added is the outermost
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    for known in (KilnError, QueueFullError, TimeoutError):
        app.add_exception_handler(known, _engine_error)
    return app


async def _engine_error(request: Request, error: Exception) -> JSONResponse:
    known = api_error(error)
    if known is None:
        raise error
    request.scope["kiln.record"].outcome = known.code or "refused"
    return known.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Our own answers, and those of the framework: no such path, not this method."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        path = request.url.path
        message = {
            404: f"there is nothing at {path!r:.100}; see /openapi.json for what there is",
            405: f"{request.method} is not for {path!r:.100}; see /openapi.json for what is",
        }.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=error.headers)
    return await _engine_error(request, error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first field that is wrong, in OpenAI's words, without its value."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    where = [str(part) for part in problems[0]["loc"][1:]]
    field = where[0] if where else None
    same = [p["msg"] for p in problems if p["loc"][1:2] == problems[0]["loc"][1:2]]
    message = "; or ".join(dict.fromkeys(same))
    if problems[0]["type"] == "extra_forbidden":
        message = "unknown field; remove it, or see /openapi.json for the fields that are served"
    elif not where:
        message = "the body is no JSON object; send one, with the header Content-Type: application/json"
    param = ".".join(where)[:100] if len(same) == 1 else field and field[:100]
    text = f"{param}: {message}" if param else message
    return await _engine_error(request, ApiError(400, text[:500], param=param or None, code="invalid_field"))
