"""`/v1/embeddings`, as OpenAI's API has it, for bundles of encoders.

Every input of a request goes to the engine by itself, the shorter ones first, so that the engine batches those of like
length, also with other requests'. An input that is too long is refused, never cut: a vector of half a text looks like
any other. How vectors come from hidden states is `engines.server.encoder`'s business.
"""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from engines.runtime.sequence import Lane
from engines.runtime.tokenizer import Tokenizer
from engines.server.context import Calling, Context, Record
from engines.server.encoder import EmbeddingConfig, Encoder, Vector
from engines.server.errors import ApiError
from engines.server.json_route import JsonRoute
from engines.server.responses import ERRORS
from engines.server.schemas import IgnoredFields, Text, TokenIds
from engines.server.served import ServedEngine

_Texts = Annotated[list[Text], Field(fail_fast=True), Field(min_length=1)]
_TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True), Field(min_length=1)]


class EmbeddingBody(IgnoredFields):
    """POST /v1/embeddings."""

    model: str = Field(description="Name of a served encoder, see /v1/models.")
    input: Text | TokenIds | _Texts | _TokenIdLists = Field(description="Text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, which is the default, or their little-endian float32 bytes."
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Length of the vectors; only lengths that the model was trained for."
    )
    lane: Lane | None = Field(None, description="interactive goes first; default: the API key's.")

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """One text or list of token ids per vector."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The answer."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def embeddings_router(configs: Mapping[str, EmbeddingConfig] | None = None) -> APIRouter:
    """The route. `configs` holds, by name, the models whose pooling, lengths or limits are not the default's."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)
    known = dict(configs or {})
    default = EmbeddingConfig()

    @router.post("/v1/embeddings", response_model=Embeddings)
    async def embeddings(body: EmbeddingBody, context: Context, caller: Calling, record: Record) -> Response:
        engine = context.engine(body.model)
        config = known.get(body.model, default)
        record.model = body.model
        if engine.info.kind == "decoder":
            raise ApiError(400, f"{body.model} generates text and gives no embeddings; use an encoder", param="model")
        encoder = Encoder(engine.info, config)
        encoder.check_dimensions(body.dimensions)
        if len(body.inputs) > config.max_inputs:
            raise ApiError(
                400, f"the request has {len(body.inputs)} inputs, the limit is {config.max_inputs}; send several"
            )
        lane = context.lane(caller, body.lane)
        inputs = await asyncio.to_thread(_token_ids, body.inputs, context, body.model, encoder, config)
        record.prompt_tokens = sum(map(len, inputs))
        vectors = await _vectors(engine, encoder, inputs, body.dimensions, lane, context.config.request_timeout)
        answer = await asyncio.to_thread(_answer, body, vectors, record.prompt_tokens)
        return Response(answer, media_type="application/json")

    return router


async def _vectors(
    engine: ServedEngine,
    encoder: Encoder,
    inputs: Sequence[list[int]],
    dimensions: int | None,
    lane: Lane,
    timeout: float,
) -> list[Vector]:
    """All inputs at once; one that fails, or a client that goes away, takes the others out of the queue."""

    async def vector(token_ids: list[int]) -> Vector:
        # Pooled at once: the hidden states of a whole request would take gigabytes.
        outputs = await engine.infer(encoder.feeds(token_ids), lane=lane, timeout=timeout)
        return encoder.vector(outputs, len(token_ids), dimensions)

    order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
    tasks = [asyncio.ensure_future(vector(inputs[index])) for index in order]
    try:
        found = dict(zip(order, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
    return [found[index] for index in range(len(inputs))]


def _token_ids(
    inputs: Sequence[str | list[int]], context: Context, model: str, encoder: Encoder, config: EmbeddingConfig
) -> list[list[int]]:
    """Checked token ids of every input. Runs on a thread of its own; tokenizing releases Python's lock."""
    texts = [item for item in inputs if isinstance(item, str)]
    has_tokenizer = context.engine(model).info.tokenizer is not None
    tokenizer: Tokenizer | None = context.tokenizer(model) if texts or has_tokenizer else None
    encoded = iter(tokenizer.encode_all(texts) if tokenizer else [])
    token_ids = [next(encoded) if isinstance(item, str) else item for item in inputs]
    limits = [config.max_tokens, encoder.fixed_tokens, tokenizer.max_length if tokenizer else None]
    most = min((limit for limit in limits if limit is not None), default=None)
    for index, ids in enumerate(token_ids):
        if most is not None and len(ids) > most:
            raise ApiError(
                400,
                f"input {index} has {len(ids)} tokens, {model} takes {most} at most; split the text, for a vector "
                "of its beginning would pass for one of the whole",
                param="input",
                code="context_length_exceeded",
            )
        if tokenizer is not None and tokenizer.core.id_to_token(max(ids)) is None:
            raise ApiError(400, f"input {index} has token id {max(ids)}, which {model} does not know", param="input")
    return token_ids


def _answer(body: EmbeddingBody, vectors: Sequence[Vector], tokens: int) -> bytes:
    """The response's JSON, encoded vector by vector, so that other threads get their turns."""
    items = []
    for index, vector in enumerate(vectors):
        if body.encoding_format == "base64":
            value = f'"{base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()}"'
        else:
            value = json.dumps(vector.tolist())
        items.append(f'{{"object":"embedding","index":{index},"embedding":{value}}}')
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    data = ",".join(items)
    return f'{{"object":"list","data":[{data}],"model":{json.dumps(body.model)},"usage":{usage}}}'.encode()
