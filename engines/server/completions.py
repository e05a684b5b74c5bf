"""POST /v1/completions: text or tokens in, their continuation out."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Response

from engines.runtime.request import TokenChunk, TokenLogprobs
from engines.server.context import Calling, Context, Record, RequestRecord, ServerContext
from engines.server.errors import ApiError
from engines.server.generation import Answer, Generation, finite, request_from_body
from engines.server.json_route import JsonRoute
from engines.server.responses import STREAMED, Completion, CompletionChoice, CompletionLogprobs, Usage
from engines.server.schemas import CompletionBody
from engines.server.sse import EventStream
from engines.server.token_text import TokenText

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completions_router() -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    router.add_api_route(
        "/v1/completions", _completions, methods=["POST"], response_model=Completion, responses=STREAMED
    )
    return router


async def _completions(
    body: CompletionBody, context: Context, caller: Calling, record: Record
) -> Completion | Response:
    """Continue every prompt. The answers to one prompt follow each other, in the order of the prompts."""
    engine = context.decoder(body.model)
    record.model = body.model
    _refuse_what_is_not_served(body)
    request = request_from_body(
        body,
        context,
        caller,
        engine.info,
        max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )
    prompts = await asyncio.to_thread(_prompts, context, body)
    count = len(prompts) * request.sampling.n
    if count > context.config.max_prompts:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {request.sampling.n} answers each are {count}; expected at most "
            f"{context.config.max_prompts} at a time",
            param="prompt",
        )
    spelling = None if body.logprobs is None else await asyncio.to_thread(context.token_text, body.model)
    echoes = await asyncio.to_thread(_echoes, context, body, prompts) if body.echo else [""] * len(prompts)
    generation = await Generation.start(context, engine, record, prompts, request)
    answer = _Wording(body, record, generation, spelling, [echo for echo in echoes for _ in range(body.n or 1)])
    if body.stream:
        return EventStream(answer.events())
    await generation.finish()
    return answer.whole()


def _refuse_what_is_not_served(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}; only best_of equal to n is served: use n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "log-probabilities of the prompt are not served; use echo or logprobs alone", param="echo")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream; remove it or set stream", param="stream_options")


def _prompts(context: ServerContext, body: CompletionBody) -> list[tuple[int, ...]]:
    """Token ids of every prompt."""
    prompt = body.prompt
    prompts: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if isinstance(prompts[0], str):
        prompts = context.tokenizer(body.model).encode_all(prompts)
    return [tuple(ids) for ids in prompts]


def _echoes(context: ServerContext, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What `echo` puts before the answers."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], str):
        return [text for text in body.prompt if isinstance(text, str)]
    tokenizer = context.tokenizer(body.model)
    return [tokenizer.decode(ids) for ids in prompts]


class _Wording:
    """One generation in the words of this API."""

    def __init__(
        self,
        body: CompletionBody,
        record: RequestRecord,
        generation: Generation,
        spelling: TokenText | None,
        echoes: list[str],
    ) -> None:
        self._body = body
        self._generation = generation
        self._echoes = echoes
        self._spellings = None if spelling is None else [_Offsets(spelling) for _ in generation.answers]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{record.id}",
            "object": "text_completion",
            "created": generation.created,
            "model": body.model,
            "system_fingerprint": generation.fingerprint,
        }

    def whole(self) -> Completion:
        choices = [
            CompletionChoice(**self._choice(index, self._echoes[index] + answer.text, answer.logprobs, answer))
            for index, answer in enumerate(self._generation.answers)
        ]
        return Completion(**self._head, choices=choices, usage=Usage(**self._generation.usage()))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        with_usage = self._body.stream_options is not None and bool(self._body.stream_options.include_usage)
        no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
        for index, echo in enumerate(self._echoes):
            if echo:
                yield {**self._head, "choices": [self._choice(index, echo, (), None)], **no_usage}
        async for index, chunk in self._generation.chunks():
            if chunk.token_ids or chunk.text or chunk.finish_reason:
                yield {**self._head, "choices": [self._chunk(index, chunk)], **no_usage}
        if with_usage:
            yield {**self._head, "choices": [], "usage": self._generation.usage()}

    def _chunk(self, index: int, chunk: TokenChunk) -> dict[str, Any]:
        answer = self._generation.answers[index]
        return self._choice(index, chunk.text, chunk.logprobs, answer if chunk.finish_reason else None)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finished: Answer | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._spellings is None else self._spellings[index].worded(logprobs),
            "finish_reason": finished and finished.finish_reason,
            "stop_reason": finished and finished.stop_reason,
        }


class _Offsets:
    """Log-probabilities of one answer, with the places of its tokens in its text."""

    def __init__(self, spelling: TokenText) -> None:
        self._spelling = spelling
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def worded(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of the answer. Without `top` the most likely ones were not asked for."""
        offsets = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._spelling.bytes_of(entry.token)))
        top = [{self._text(token): finite(value) for token, value in entry.top} for entry in logprobs]
        return CompletionLogprobs(
            tokens=[self._text(entry.token) for entry in logprobs],
            token_logprobs=[finite(entry.logprob) for entry in logprobs],
            top_logprobs=top if any(top) else None,
            text_offset=offsets,
        ).model_dump()

    def _text(self, token: int) -> str:
        """OpenAI's spelling of a token that is half a character: bytes:\\xe2\\x82."""
        raw = self._spelling.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
