"""What is served, how it reads text, and whether it works: /v1/models, /tokenize, /detokenize, /health."""

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engines.runtime.info import EngineInfo
from engines.server.chat import chat_token_ids
from engines.server.context import Context, Record
from engines.server.errors import ApiError
from engines.server.generation import created_from_info
from engines.server.json_route import JsonRoute
from engines.server.responses import ERRORS, Detokenized, Model, ModelList, Tokens
from engines.server.schemas import DetokenizeBody, TokenizeBody


def models_router() -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["models"], responses=ERRORS)
    router.add_api_route("/v1/models", _models, methods=["GET"])
    router.add_api_route("/v1/models/{model:path}", _model, methods=["GET"])
    router.add_api_route("/tokenize", _tokenize, methods=["POST"])
    router.add_api_route("/detokenize", _detokenize, methods=["POST"])
    return router


def health_router() -> APIRouter:
    """/health/live: this process answers. /health/ready, /health: requests are taken, 503 where not."""
    router = APIRouter(tags=["health"])
    router.add_api_route("/health/live", _live, methods=["GET"])
    unready: dict[int | str, dict[str, Any]] = {
        503: {"description": "The server is ending, or an engine is being restarted."}
    }
    for path in ("/health/ready", "/health"):
        router.add_api_route(path, _ready, methods=["GET"], responses=unready)
    return router


async def _models(context: Context) -> ModelList:
    return ModelList(data=[_describe(name, engine.info) for name, engine in context.engines.items()])


async def _model(model: str, context: Context) -> Model:
    return _describe(model, context.engine(model).info)


def _describe(name: str, info: EngineInfo) -> Model:
    return Model(id=name, created=created_from_info(info), max_model_len=info.max_length or None, kind=info.kind)


async def _tokenize(body: TokenizeBody, context: Context, record: Record) -> Tokens:
    """Token ids of a prompt, as /v1/completions would see it, or of a conversation."""
    info = context.engine(body.model).info
    record.model = body.model
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either prompt or messages", param="prompt")
    tokens = await asyncio.to_thread(_token_ids, body, context)
    record.prompt_tokens = len(tokens)
    return Tokens(count=len(tokens), max_model_len=info.max_length or None, tokens=tokens)


def _token_ids(body: TokenizeBody, context: Context) -> list[int]:
    if body.messages is not None:
        return list(chat_token_ids(context, body.model, body.messages, body.tools))
    return context.tokenizer(body.model).encode_all([body.prompt or ""])[0]


async def _detokenize(body: DetokenizeBody, context: Context, record: Record) -> Detokenized:
    """Text of token ids, special tokens included."""
    context.engine(body.model)
    record.model = body.model
    return Detokenized(prompt=await asyncio.to_thread(_text, body, context))


def _text(body: DetokenizeBody, context: Context) -> str:
    core = context.tokenizer(body.model).core
    size = core.get_vocab_size()
    if body.tokens and max(body.tokens) >= size:
        raise ApiError(400, f"there is the token id {max(body.tokens)}; expected 0 to {size - 1}", param="tokens")
    return core.decode(body.tokens, skip_special_tokens=False)


async def _live() -> dict[str, bool]:
    return {"live": True}


async def _ready(context: Context) -> JSONResponse:
    models: dict[str, Any] = {name: engine.ready for name, engine in context.engines.items()}
    state = {"ready": context.ready, "draining": context.draining, "models": models}
    return JSONResponse(state, 200 if context.ready else 503)
