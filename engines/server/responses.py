"""Answers of the OpenAI API as this server words them, for routes and for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kiln"
    max_model_len: int | None = Field(description="Most tokens of prompt and answer together.")
    kind: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage


class Tokens(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Detokenized(BaseModel):
    prompt: str


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused: engines/server/errors.py lists the reasons."},
    "5XX": {"model": ErrorBody, "description": "The server is ending, an engine is down, or the request failed."},
}

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with stream its chunks as server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **ERRORS,
}
