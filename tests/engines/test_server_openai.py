"""The OpenAI API as OpenAI's own client sees it, over a real engine and a real socket."""

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.request import Completion, Guidance, RequestError, SamplingParams, TokenChunk
from engines.server.served import EngineDiedError, LocalEngine

TEMPLATE = (
    "{% if tools %}tools{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}[{{ c['function']['arguments']['city'] }}]{% endfor %}{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with Engine.open(tiny_bundle.path) as engine:
        yield engine


@pytest.fixture(scope="module")
def chat_tokenizer(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bundle.tokenizer_path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(engine, chat_tokenizer, recorded_engine, served_on):
    return served_on({"tiny": recorded_engine(engine, chat_tokenizer)})


@pytest.fixture
def tiny(server):
    server.context.engines["tiny"].submitted.queue.clear()
    return server.context.engines["tiny"]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def greedy(engine, prompt, count, **sampling):
    return engine.generate([prompt], SamplingParams(max_tokens=count, **sampling))[0]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "kiln", 256)
    assert model.created == 1767225600
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here; expected one of tiny"):
        client.models.retrieve("other")


def test_a_completion_is_what_the_engine_gives(client, engine):
    expected = greedy(engine, "HELLO", 12, ignore_eos=True)
    got = client.completions.create(
        model="tiny", prompt="HELLO", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (expected.text, "length", None)
    assert got.object == "text_completion"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 12, 17)
    assert got.system_fingerprint == f"kiln-{engine.info.sha256[:12]}"


def test_defaults_are_those_of_openai(client, tiny):
    got = client.completions.create(model="tiny", prompt="HELLO")
    request, _ = tiny.submitted.get_nowait()
    assert request.sampling == SamplingParams(temperature=1.0, max_tokens=16)
    assert (request.lane, request.tenant, request.timeout) == ("interactive", "", 600)
    assert got.usage.completion_tokens <= 16


def test_every_field_reaches_the_engine(client, tiny):
    client.completions.create(
        model="tiny",
        prompt=[1, 2, 3],
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={"5": 2.5, "7": -100},
        seed=-1,
        stop=["XYZ", "!"],
        n=2,
        best_of=2,
        logprobs=3,
        user="somebody",
        extra_body={"top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "lane": "batch"},
    )
    request, _ = tiny.submitted.get_nowait()
    assert request.sampling == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={5: 2.5, 7: -100},
        seed=2**64 - 1,
        stop=("XYZ", "!"),
        n=2,
        logprobs=3,
        top_k=7,
        min_p=0.01,
        repetition_penalty=1.1,
        ignore_eos=True,
    )
    assert (request.prompt, request.lane) == ((1, 2, 3), "batch")


@pytest.mark.parametrize("prompts", [["HELLO", "WORLD", "A"], [[1, 2, 3], [4, 5], [6]]])
def test_a_list_of_prompts_gives_choices_in_its_order(client, engine, prompts):
    got = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, n=2)
    assert [c.index for c in got.choices] == list(range(6))
    expected = [greedy(engine, prompt, 6).text for prompt in prompts for _ in range(2)]
    assert [c.text for c in got.choices] == expected
    assert got.usage.prompt_tokens == sum(map(len, prompts))


def test_answers_with_a_seed_are_reproducible_and_differ_from_each_other(client):
    def ask():
        got = client.completions.create(model="tiny", prompt="HELLO", max_tokens=10, n=3, seed=4)
        return [choice.text for choice in got.choices]

    first = ask()
    assert ask() == first
    assert len(set(first)) == 3


def test_a_stream_is_the_answer_in_pieces(client):
    ask = {"model": "tiny", "prompt": ["HELLO", "WORLD"], "max_tokens": 9, "n": 2, "seed": 5, "logprobs": 1}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for expected in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [expected.finish_reason]
        offsets = [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset]
        assert offsets == expected.logprobs.text_offset
    assert len(chunks) > 9


def test_logprobs_name_tokens_and_places(client, engine):
    expected = greedy(engine, "HELLO", 5, logprobs=3, ignore_eos=True)
    ask = {"model": "tiny", "prompt": "HELLO", "max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}
    got = client.completions.create(**ask, logprobs=3).choices[0].logprobs
    assert "".join(token for token in got.tokens if token != "<end>") == expected.text
    assert got.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert [next(iter(top.values())) for top in got.top_logprobs] == pytest.approx(got.token_logprobs)
    assert all(len(top) == 3 for top in got.top_logprobs)
    assert got.text_offset[0] == 0
    alone = client.completions.create(**ask, logprobs=0).choices[0].logprobs
    assert (alone.tokens, alone.top_logprobs) == (got.tokens, None)


def test_echo_puts_the_prompt_before_the_answer(client, engine):
    answer = greedy(engine, "HELLO", 4).text
    for prompt in ("HELLO", ["HELLO"], [8, 5, 12, 12, 15]):
        ask = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True}
        assert client.completions.create(**ask).choices[0].text == "HELLO" + answer
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
        assert "".join(pieces) == "HELLO" + answer


def test_a_stop_string_is_not_in_the_answer(client, engine):
    text = greedy(engine, "HELLO", 30, ignore_eos=True).text
    stop = text[6:8]
    got = client.completions.create(
        model="tiny", prompt="HELLO", max_tokens=30, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"


def test_chat_uses_the_template(client, tiny, engine):
    messages = [
        {"role": "developer", "content": "Be"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    got = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_completion_tokens=7)
    request, _ = tiny.submitted.get_nowait()
    prompt = engine.tokenizer.encode("[system]Be[user]one\ntwo[assistant]")
    assert list(request.prompt) == prompt
    (choice,) = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", greedy(engine, prompt, 7).text)
    assert choice.finish_reason in ("stop", "length")
    assert got.object == "chat.completion"
    assert got.usage.prompt_tokens == len(prompt)


def test_chat_streams_and_reports_logprobs(client):
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "HI"}],
        "max_tokens": 8,
        "n": 2,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for expected in whole.choices:
        deltas = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in deltas) == expected.message.content
        assert [c.finish_reason for c in deltas if c.finish_reason] == [expected.finish_reason]
        content = [entry for c in deltas if c.logprobs for entry in c.logprobs.content]
        assert [entry.token for entry in content] == [entry.token for entry in expected.logprobs.content]
        assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
        assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_a_response_goes_back_as_a_message(client):
    first = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "HI"}], max_tokens=3)
    answer = first.choices[0].message
    client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "HI"}, answer, {"role": "user", "content": "ON"}]
    )


def test_tools_are_given_to_the_template(client, tiny, engine):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "How"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "cold", "tool_call_id": "1"},
    ]
    ask = {"model": "tiny", "messages": messages, "tools": [tool], "max_tokens": 1}
    chat = "[user]How[assistant][Oslo][tool]cold[assistant]"
    for choice, text in (("auto", "tools[weather]" + chat), ("none", chat)):
        client.chat.completions.create(**ask, tool_choice=choice)
        request, _ = tiny.submitted.get_nowait()
        assert list(request.prompt) == engine.tokenizer.encode(text)
    with pytest.raises(openai.BadRequestError, match="tool_choice is 'required'; expected auto or none"):
        client.chat.completions.create(**ask, tool_choice="required")


def test_the_asynchronous_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "max_tokens": 6, "temperature": 0}
            whole = await asyncio.gather(*(client.completions.create(**ask, prompt="A" * n) for n in range(1, 20)))
            stream = await client.completions.create(**ask, prompt="AAA", stream=True)
            pieces = [chunk.choices[0].text async for chunk in stream]
            return [got.choices[0].text for got in whole], "".join(pieces)

    texts, streamed = asyncio.run(main())
    assert streamed == texts[2]


def test_tokenize_and_detokenize(server):
    with httpx.Client(base_url=server.url) as http:
        got = http.post("/tokenize", json={"model": "tiny", "prompt": "ABC"}).json()
        assert got == {"count": 3, "max_model_len": 256, "tokens": [1, 2, 3]}
        chat = http.post("/tokenize", json={"model": "tiny", "messages": [{"role": "user", "content": "A"}]}).json()
        text = http.post("/detokenize", json={"model": "tiny", "tokens": [*chat["tokens"], 0]}).json()
        assert text == {"prompt": "[user]A[assistant]<end>"}


class ScriptedEngine:
    """Gives what a test says; what follows the chunks is raised."""

    ready = True

    def __init__(self, info: EngineInfo, *script: TokenChunk | Exception) -> None:
        self.info = info
        self.requests = []
        self._script = script

    async def submit(self, request):
        self.requests.append(request)
        return [self for _ in range(request.sampling.n)]

    async def __aiter__(self):
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        pass

    async def metrics(self):
        return []


@pytest.fixture
def scripted(engine, chat_tokenizer, served_on):
    def make(*script):
        scripted = ScriptedEngine(replace(engine.info, tokenizer=str(chat_tokenizer)), *script)
        client = openai.OpenAI(base_url=f"{served_on({'tiny': scripted}).url}/v1", api_key="none", max_retries=0)
        return scripted, client

    return make


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Guidance("json_schema", json.dumps(SCHEMA)),
        ),
        ({"response_format": {"type": "json_object"}}, Guidance("json_object")),
        ({"response_format": {"type": "text"}}, None),
        ({"extra_body": {"guided_json": SCHEMA}}, Guidance("json_schema", json.dumps(SCHEMA))),
        ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, Guidance("json_schema", json.dumps(SCHEMA))),
        ({"extra_body": {"guided_regex": "[ab]+"}}, Guidance("regex", "[ab]+")),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, Guidance("choices", ("yes", "no"))),
        ({"extra_body": {"guided_grammar": 'start: "a"'}}, Guidance("grammar", 'start: "a"')),
    ],
)
def test_guidance_reaches_the_engine(scripted, ask, expected):
    engine, client = scripted(TokenChunk((1,), "A", "stop"))
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "A"}], **ask)
    assert engine.requests[0].sampling.guidance == expected


def test_one_guidance_at_a_time(scripted):
    engine, client = scripted(TokenChunk((1,), "A", "stop"))
    with pytest.raises(openai.BadRequestError, match="more than one of response_format and guided_"):
        client.completions.create(model="tiny", prompt="A", extra_body={"guided_regex": "a", "guided_choice": ["a"]})
    assert engine.requests == []


def test_a_time_limit_gives_what_there_is(scripted):
    _, client = scripted(TokenChunk((1, 2), "AB"), TokenChunk((), "", "timeout"))
    (choice,) = client.completions.create(model="tiny", prompt="A").choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("AB", "length", "timeout")


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        (TokenChunk((), "", "timeout"), 504, "time limit passed before its first token"),
        (TokenChunk((), "", "cancelled"), 503, "shutting down"),
        (RequestError("the step failed", Completion((), "", "error", 1)), 500, "the step failed"),
        (EngineDiedError("the engine's process ended; send it again"), 503, "the engine's process ended"),
        (ZeroDivisionError("secret"), 500, "the server failed; its log says more about the request"),
    ],
)
def test_failures_have_a_status_or_end_the_stream_with_an_error(scripted, ending, status, message):
    _, client = scripted(ending)
    ask = {"model": "tiny", "prompt": "A"}
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.completions.create(**ask)
    assert caught.value.status_code == status
    assert (caught.value.response.headers.get("x-should-retry") == "false") == (status == 504)
    assert ("retry-after" in caught.value.response.headers) == (status == 503)
    with pytest.raises(openai.APIError, match=message):
        list(client.completions.create(**ask, stream=True))
    with client.completions.with_streaming_response.create(**ask, stream=True) as response:
        *_, error, data, done = [line for line in response.iter_lines() if line]
    assert (error, done) == ("event: error", "data: [DONE]")
    assert json.loads(data.removeprefix("data: "))["error"]["message"]
    assert "secret" not in data


def test_models_that_generate_nothing_say_so(served_on, twice_bundle):
    with Engine.open(twice_bundle.path) as engine:
        client = openai.OpenAI(base_url=f"{served_on({'twice': LocalEngine(engine)}).url}/v1", api_key="none")
        with pytest.raises(openai.BadRequestError, match="twice generates no text; use /v1/embeddings or /v2/models"):
            client.completions.create(model="twice", prompt="A")
