"""Bodies of the OpenAI API as this server reads them: strictly, with nothing unknown in them.

A field that is not here is refused with its name, because a client that sets it relies on something that would not
happen. The exceptions are fields that change nothing in an answer, in `IgnoredFields`; they are read and not used.
null means the default everywhere. vLLM's names are used for what OpenAI's API lacks.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engines.runtime.sequence import Lane

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), Field(min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True), Field(min_length=1, max_length=128)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True), Field(min_length=1, max_length=128)]


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class IgnoredFields(Body):
    """Fields for OpenAI's own platform: accepted so that clients need no change, and without effect."""

    user: Any = Field(None, description="Ignored; the API key says whose request it is.")
    metadata: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored: nothing is stored.")
    service_tier: Any = Field(None, description="Ignored; see lane.")
    safety_identifier: Any = Field(None, description="Ignored.")
    prompt_cache_key: Any = Field(None, description="Ignored: prefixes are shared within a tenant.")
    prompt_cache_retention: Any = Field(None, description="Ignored.")
    prediction: Any = Field(None, description="Ignored: it would change the speed only.")


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send the number of tokens in a last chunk.")
    include_obfuscation: Any = Field(None, description="Ignored.")


class SamplingFields(IgnoredFields):
    """What both ways to generate take. Ranges that SamplingParams checks are stated here for the OpenAPI document."""

    model: str = Field(description="Name of a served model, see /v1/models.")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Answers to each prompt; default 1.")
    stream: bool | None = Field(None, description="Send tokens as they come, as server-sent events.")
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = Field(
        None, description="Generation ends where one of these appears, which is not part of the answer."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="The same seed gives the same answer, whatever else the server does."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = Field(None, description="Added to the logits of tokens, by id.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="Default and 0, -1: no limit.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-sequence token.")
    guided_json: dict[str, Any] | Text | None = Field(None, description="JSON Schema of the answer.")
    guided_regex: Text | None = Field(None, description="Regular expression of the answer.")
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="The answer is one of these."
    )
    guided_grammar: Text | None = Field(None, description="Grammar of the answer, in llguidance's Lark dialect.")
    lane: Lane | None = Field(None, description="interactive goes first; default: the API key's.")


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Texts | TokenIdLists = Field(description="Text, token ids, or a list of either.")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description="Default 16, as OpenAI's.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Report the log-probability of every token and of so many most likely ones."
    )
    echo: bool | None = Field(None, description="Begin the answer with the prompt; not together with logprobs.")
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Only equal to n.")
    suffix: None = Field(None, description="Not served.")


class ContentPart(BaseModel):
    """A part of a message; others than text are refused, with a message that says so."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn. What OpenAI's clients add when they send an answer back is accepted and ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Any = Field(None, description="Ignored.")
    annotations: Any = Field(None, description="Ignored.")
    audio: None = Field(None, description="Not served.")
    function_call: None = Field(None, description="Not served; use tool_calls.")
    reasoning_content: Any = Field(None, description="Ignored.")


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Ignored: the schema always holds.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionTool(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Default: what the model's context leaves."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    logprobs: bool | None = Field(None, description="Report the log-probability of every token.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="Needs logprobs.")
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, description="Given to the model's chat template.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto or none.")
    parallel_tool_calls: Any = Field(None, description="Ignored.")
    reasoning_effort: Any = Field(None, description="Ignored.")
    verbosity: Any = Field(None, description="Ignored.")
    modalities: list[Literal["text"]] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages of a chat."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
