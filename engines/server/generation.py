"""Between the bodies of requests and the engine: sampling parameters in, chunks of several answers out.

Knows nothing of how an answer is worded; `completions` and `chat` do that. How answers end, in OpenAI's terms:

| the engine says | whole answers | streams |
|---|---|---|
| stop, length | finish_reason | finish_reason |
| timeout, some tokens generated | finish_reason `length`, stop_reason `timeout` | the same |
| timeout before the first token | status 504 | error event |
| cancelled: the server ends | status 503 | error event |
| error | status 500, or 503 when the engine died | error event |
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from engines.runtime.info import EngineInfo
from engines.runtime.request import Guidance, Request, SamplingParams, TokenChunk, TokenLogprobs
from engines.server.auth import Caller
from engines.server.context import RequestRecord, ServerContext
from engines.server.errors import ApiError, shutting_down, timed_out
from engines.server.schemas import SamplingFields
from engines.server.served import ServedEngine, TokenStream

FinishReason = Literal["stop", "length"]

_SEEDS = 2**64


@dataclass
class Answer:
    """One answer as far as it is known."""

    prompt: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """`timeout` where that, and no number of tokens, was the limit; an addition to OpenAI's API, as in vLLM."""

    def take(self, chunk: TokenChunk) -> None:
        """Raises ApiError when the chunk ends the answer in a way that is none for the client."""
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason == "timeout":
            if not self.token_ids:
                raise timed_out("the request's time limit passed before its first token; try again when less waits")
            self.finish_reason, self.stop_reason = "length", "timeout"
        elif chunk.finish_reason in ("stop", "length"):
            self.finish_reason = chunk.finish_reason
        elif chunk.finish_reason is not None:
            raise shutting_down()


class Generation:
    """The answers to the prompts of one request: n to the first prompt, n to the second, and so on."""

    def __init__(self, engine: ServedEngine, record: RequestRecord, answers: list[Answer]) -> None:
        self.engine = engine
        self.answers = answers
        self.created = int(time.time())
        self._record = record

    @classmethod
    async def start(
        cls,
        context: ServerContext,
        engine: ServedEngine,
        record: RequestRecord,
        prompts: Sequence[tuple[int, ...]],
        request: Request,
    ) -> "Generation":
        """Queue everything. `request` says how, its prompt is not used. Raises ApiError and what `submit` raises."""
        answers: list[Answer] = []
        for prompt in prompts:
            _check_length(prompt, engine.info)
        for prompt in prompts:
            streams = await engine.submit(replace(request, prompt=prompt))
            record.streams.extend(streams)
            record.prompt_tokens += len(prompt)
            answers.extend(Answer(prompt) for _ in streams)
        return cls(engine, record, answers)

    async def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Chunks as they come, each with the index of its answer, which has taken it already."""
        async with aclosing(_merged(self._record.streams)) as chunks:
            async for index, chunk in chunks:
                self._record.generated_tokens += len(chunk.token_ids)
                self.answers[index].take(chunk)
                if chunk.finish_reason is not None:
                    self._record.outcome = chunk.finish_reason
                yield index, chunk

    async def finish(self) -> None:
        """Wait until every answer is whole."""
        async for _ in self.chunks():
            pass

    @property
    def fingerprint(self) -> str | None:
        """What answers depend on besides the request: the bundle."""
        return f"kiln-{self.engine.info.sha256[:12]}" if self.engine.info.sha256 else None

    def usage(self) -> dict[str, int]:
        return usage(self._record.prompt_tokens, self._record.generated_tokens)


def usage(prompt: int, generated: int = 0) -> dict[str, int]:
    """Token counts; a prompt counts once however many answers it has."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API gives -9999 for what cannot happen."""
    return max(float(logprob), -9999.0)


def created_from_info(info: EngineInfo) -> int:
    """Seconds since 1970 at which the bundle was built; 0 where it is not known."""
    with suppress(ValueError):
        return int(datetime.fromisoformat(info.created).timestamp())
    return 0


def request_from_body(
    body: SamplingFields,
    context: ServerContext,
    caller: Caller,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    guidance: Guidance | None = None,
) -> Request:
    """How the engine shall answer; its prompt is empty. Raises ApiError, and KilnError from SamplingParams."""
    guided = [g for g in (guidance, *_guidance_from_fields(body)) if g is not None]
    if len(guided) > 1:
        raise ApiError(400, "more than one of response_format and guided_... is set; use one", param="response_format")
    sampling = SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=None if body.top_k is None or body.top_k < 1 else body.top_k,
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_bias(body, info),
        logprobs=logprobs,
        seed=None if body.seed is None else body.seed % _SEEDS,
        max_tokens=max_tokens,
        stop=() if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        ignore_eos=bool(body.ignore_eos),
        n=body.n or 1,
        guidance=guided[0] if guided else None,
    )
    return Request(
        (),
        sampling,
        context.lane(caller, body.lane),
        context.config.request_timeout,
        caller.tenant,
        whole=not body.stream,
    )


def schema_text(schema: dict[str, Any], param: str) -> str:
    """A JSON Schema as JSON. Raises ApiError for numbers that JSON does not have."""
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the schema has a number that is not finite ({error}); remove it", param=param) from error


def _guidance_from_fields(body: SamplingFields) -> list[Guidance]:
    found = []
    if body.guided_json is not None:
        schema = body.guided_json
        text = schema if isinstance(schema, str) else schema_text(schema, "guided_json")
        found.append(Guidance("json_schema", text))
    if body.guided_regex is not None:
        found.append(Guidance("regex", body.guided_regex))
    if body.guided_choice is not None:
        found.append(Guidance("choices", tuple(body.guided_choice)))
    if body.guided_grammar is not None:
        found.append(Guidance("grammar", body.guided_grammar))
    return found


def _bias(body: SamplingFields, info: EngineInfo) -> dict[int, float]:
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for token in bias:
        if token >= info.vocab_size:
            raise ApiError(
                400, f"logit_bias has the token id {token}; expected 0 to {info.vocab_size - 1}", param="logit_bias"
            )
    return bias


def _check_length(prompt: tuple[int, ...], info: EngineInfo) -> None:
    if len(prompt) >= info.max_length:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, {info.name} holds {info.max_length} of prompt and answer together; "
            f"shorten it to at most {info.max_length - 1}",
            code="context_length_exceeded",
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


async def _merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Chunks of all streams as they come. The first stream that fails ends it."""
    if len(streams) == 1:  # no tasks, no queue: most requests
        async for chunk in streams[0]:
            yield 0, chunk
        return
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(iterator)): index for index, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                chunk = task.result()
                if chunk.finish_reason is None:  # else it was the last one
                    waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, chunk
    finally:
        for task in waiting:
            task.cancel()
