"""POST /v1/chat/completions: the turns of a conversation in, the assistant's next turn out.

Tools are given to the model's chat template. What the model answers is handed on as text: a call of a tool is spelt as
the model spells it, because that differs from model to model.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Response

from engines.runtime.request import Guidance, TokenChunk, TokenLogprobs
from engines.server.context import Calling, Context, Record, RequestRecord, ServerContext
from engines.server.errors import ApiError
from engines.server.generation import Generation, finite, request_from_body, schema_text
from engines.server.json_route import JsonRoute
from engines.server.responses import STREAMED, ChatChoice, ChatCompletion, ChatLogprobs, ChatMessage, Usage
from engines.server.schemas import ChatBody, ContentPart, Message, Tool
from engines.server.sse import EventStream
from engines.server.token_text import TokenText


def chat_router() -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    router.add_api_route(
        "/v1/chat/completions", _chat, methods=["POST"], response_model=ChatCompletion, responses=STREAMED
    )
    return router


async def _chat(body: ChatBody, context: Context, caller: Calling, record: Record) -> ChatCompletion | Response:
    """Answer a conversation."""
    engine = context.decoder(body.model)
    record.model = body.model
    _refuse_what_is_not_served(body)
    request = request_from_body(
        body,
        context,
        caller,
        engine.info,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guidance=_guidance(body),
    )
    tools = None if body.tool_choice == "none" else body.tools
    prompt = await asyncio.to_thread(chat_token_ids, context, body.model, body.messages, tools)
    spelling = await asyncio.to_thread(context.token_text, body.model) if body.logprobs else None
    generation = await Generation.start(context, engine, record, [prompt], request)
    answer = _Wording(body, record, generation, spelling)
    if body.stream:
        return EventStream(answer.events())
    await generation.finish()
    return answer.whole()


def chat_token_ids(
    context: ServerContext, model: str, messages: Sequence[Message], tools: Sequence[Tool] | None
) -> tuple[int, ...]:
    """The prompt that the model's template makes of a conversation. Raises ApiError and KilnError."""
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    offered = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    return tuple(context.tokenizer(model).chat_prompt(turns, offered))


def _refuse_what_is_not_served(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400,
            f"tool_choice is {body.tool_choice!r:.80}; expected auto or none: calls of tools cannot be enforced",
            param="tool_choice",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs; set logprobs to true", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream; remove it or set stream", param="stream_options")


def _turn(number: int, message: Message) -> dict[str, Any]:
    """One message as chat templates read it: content is text, arguments of calls are objects."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(number, message)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in turn["tool_calls"]:
            with suppress(ValueError, RecursionError):  # else the text stays, which some templates expect
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn


def _content(number: int, message: Message) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise ApiError(400, f"message {number} has no content; expected text", param=f"messages.{number}.content")
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(number, part) for part in message.content)


def _part(number: int, part: ContentPart) -> str:
    if part.type != "text" or part.text is None:
        raise ApiError(
            400,
            f"message {number} has a part of type {part.type!r:.40}; models here read text only: expected "
            '{"type": "text", "text": ...}',
            param=f"messages.{number}.content",
        )
    return part.text


def _guidance(body: ChatBody) -> Guidance | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Guidance("json_object")
    if wanted.json_schema is None:
        raise ApiError(400, "response_format has the type json_schema but no json_schema", param="response_format")
    return Guidance("json_schema", schema_text(wanted.json_schema.schema_, "response_format"))


class _Wording:
    """One generation in the words of this API."""

    def __init__(
        self, body: ChatBody, record: RequestRecord, generation: Generation, spelling: TokenText | None
    ) -> None:
        self._body = body
        self._generation = generation
        self._spelling = spelling
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{record.id}",
            "created": generation.created,
            "model": body.model,
            "system_fingerprint": generation.fingerprint,
        }

    def whole(self) -> ChatCompletion:
        choices = []
        for index, answer in enumerate(self._generation.answers):
            assert answer.finish_reason is not None, "only finished answers are whole"
            choices.append(
                ChatChoice(
                    index=index,
                    message=ChatMessage(content=answer.text),
                    logprobs=self._logprobs(answer.logprobs),
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                )
            )
        return ChatCompletion(**self._head, choices=choices, usage=Usage(**self._generation.usage()))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        with_usage = self._body.stream_options is not None and bool(self._body.stream_options.include_usage)
        head = {**self._head, "object": "chat.completion.chunk"}
        usage: dict[str, Any] = {"usage": None} if with_usage else {}
        for index in range(len(self._generation.answers)):
            first = {"role": "assistant", "content": ""}
            yield {**head, "choices": [_choice(index, first)], **usage}
        async for index, chunk in self._generation.chunks():
            for choice in self._choices(index, chunk):
                yield {**head, "choices": [choice], **usage}
        if with_usage:
            yield {**head, "choices": [], "usage": self._generation.usage()}

    def _choices(self, index: int, chunk: TokenChunk) -> list[dict[str, Any]]:
        choices = []
        if chunk.text or chunk.logprobs:
            logprobs = self._logprobs(chunk.logprobs)
            worded = None if logprobs is None else logprobs.model_dump()
            choices.append(_choice(index, {"content": chunk.text}, worded))
        if chunk.finish_reason is not None:
            answer = self._generation.answers[index]
            ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            choices.append(_choice(index, {}) | ending)
        return choices

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._spelling is None:
            return None
        content: list[Any] = [
            {**self._token(entry.token, entry.logprob), "top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in logprobs
        ]
        return ChatLogprobs(content=content)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._spelling is not None
        raw = self._spelling.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
