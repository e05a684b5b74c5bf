"""One behaviour of the C API, seen from Python (engines.capi.client) and from a program that is not Python.

Every test runs twice: in this process through the binding, and in a process of driver.cc (see conftest.py), which calls
the same table from C++ threads.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import onnx
import pytest

from engines.capi.client import CApiError, Code
from engines.runtime.request import Guidance, Request, SamplingParams, TokenChunk

THREADS = 8
GARBAGE = 0xDEADBEEF0
PROMPTS = [tuple(range(1, length)) for length in (2, 3, 9, 20, 45)]
WAITS = {"batch_wait": 600.0, "max_waiting": 1}
"""Options with which a lone request waits for company, so that nothing comes until it is cancelled."""


@pytest.fixture
def waiting(api, tiny_bundle):
    """An engine on which a request gets nothing until it is cancelled."""
    handle = api.open(tiny_bundle.path, {"threads": 1, **WAITS})
    yield handle
    api.close(handle)


def read(api, stream) -> list[tuple[int, TokenChunk]]:
    """Everything to the end."""
    chunks = []
    while (found := api.wait(stream, 60)) is not None:
        chunks.append(found)
    return chunks


def answer(api, engine, request) -> tuple[tuple[int, ...], str, str]:
    stream = api.submit(engine, request)
    chunks = [chunk for _, chunk in read(api, stream)]
    api.stream_close(stream)
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def in_threads(function: Callable, count: int = THREADS) -> list:
    """Results of as many calls at once; errors are results."""
    barrier = threading.Barrier(count)

    def call(number: int):
        barrier.wait(30)
        try:
            return function(number)
        except CApiError as error:
            return error.code

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


@contextmanager
def refused(code: Code, match: str) -> Iterator[None]:
    with pytest.raises(CApiError, match=match) as info:
        yield
    assert info.value.code is code


def test_version_and_description(api, engine, truth):
    from importlib.metadata import version

    assert api.version() == version("kiln-engine")
    assert api.describe(engine) == json.loads(json.dumps(truth.info.to_dict()))


REQUESTS = [
    *(Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in PROMPTS),
    Request("HELLO", SamplingParams(max_tokens=20)),
    Request("HELLO", SamplingParams(max_tokens=20, logit_bias={7: 100.0, 3: -100.0}), lane="batch", tenant="somebody"),
    Request("HELLO", SamplingParams(max_tokens=20, temperature=2.0, seed=2**64 - 1, top_k=40, top_p=0.9, min_p=0.01)),
    Request("HELLO", SamplingParams(max_tokens=20, temperature=5.0, seed=5, frequency_penalty=2, presence_penalty=-2)),
    Request("HELLO", SamplingParams(max_tokens=20, repetition_penalty=5.0, ignore_eos=True), timeout=1000.0),
    Request("HELLO", SamplingParams(max_tokens=9, guidance=Guidance("choices", ("ABABAB", "BA,BA")))),
    Request("HELLO", SamplingParams(max_tokens=9, guidance=Guidance("regex", "[A-C]{5}"))),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_answers_are_those_of_the_runtime(api, engine, truth, number):
    expected = truth.generate([REQUESTS[number]])[0]
    assert answer(api, engine, REQUESTS[number]) == (expected.token_ids, expected.text, expected.finish_reason)


def test_stop_strings(api, engine, truth):
    whole = truth.generate(["HELLO"], SamplingParams(max_tokens=30, ignore_eos=True))[0].text
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop=("no, such", whole[7:10]))
    assert answer(api, engine, Request("HELLO", sampling))[1:] == (whole[: whole.index(whole[7:10])], "stop")


def test_log_probabilities(api, engine, truth):
    request = Request("HELLO", SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True))
    expected = truth.generate([request])[0].logprobs
    stream = api.submit(engine, request)
    found = [position for _, chunk in read(api, stream) for position in chunk.logprobs]
    api.stream_close(stream)
    assert [p.token for p in found] == [p.token for p in expected]
    assert [[token for token, _ in p.top] for p in found] == [[token for token, _ in p.top] for p in expected]
    np.testing.assert_allclose([p.logprob for p in found], [p.logprob for p in expected], atol=1e-5)


def test_choices_come_as_one_stream(api, engine, truth):
    request = Request("HELLO", SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=3, ignore_eos=True))
    expected = [completion.token_ids for completion in truth.generate([request])]
    stream = api.submit(engine, request)
    found = read(api, stream)
    assert [tuple(t for at, chunk in found if at == choice for t in chunk.token_ids) for choice in range(3)] == expected
    assert sorted(choice for choice, chunk in found if chunk.finish_reason == "length") == [0, 1, 2]
    assert api.wait(stream, 0) is None, "the end stays the end"
    api.stream_close(stream)


def test_text_and_tokens(api, engine):
    assert api.tokenize(engine, "HELLO") == [8, 5, 12, 12, 15]
    assert api.tokenize(engine, "") == []
    assert api.detokenize(engine, [8, 5, 12, 12, 15]) == "HELLO"
    assert api.detokenize(engine, []) == ""
    with refused(Code.INVALID_ARGUMENT, "no chat template"):
        api.tokenize_chat(engine, [{"role": "user", "content": "hello"}])
    with refused(Code.INVALID_ARGUMENT, "expected a JSON array"):
        api.tokenize_chat(engine, {"role": "user"})
    with refused(Code.INVALID_ARGUMENT, "tokens has the id 61; expected 0 to 60"):
        api.detokenize(engine, [1, 61])


def test_metrics_count(api, engine):
    def finished() -> float:
        lines = [line for line in api.metrics(engine).splitlines() if line.startswith("kiln_requests_total")]
        return sum(float(line.split()[-1]) for line in lines)

    before = finished()
    answer(api, engine, Request("HELLO", SamplingParams(max_tokens=2)))
    assert finished() == before + 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"n": 129}, "n is 129"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"logit_bias": {3: 200.0}}, "logit_bias of token 3"),
        ({"stop": ("",)}, "stop is"),
    ],
)
def test_wrong_sampling_is_refused_with_the_runtimes_words(api, engine, sampling, message):
    right = SamplingParams()
    for name, value in sampling.items():  # past the checks of the constructor: the other side must make them
        object.__setattr__(right, name, value)
    with refused(Code.INVALID_ARGUMENT, message):
        api.submit(engine, Request("HELLO", right))


def test_wrong_prompts(api, engine):
    for prompt, message in (("", "empty"), ((), "empty"), ((61,), "token id 61"), ((1,) * 300, "300 tokens")):
        with refused(Code.INVALID_ARGUMENT, message):
            api.submit(engine, Request(prompt))
    with refused(Code.INVALID_ARGUMENT, "prompt is not UTF-8 text"):
        api.submit(engine, Request("A\udcff"))


def test_nothing_yet_then_cancelled(api, waiting):
    stream = api.submit(waiting, Request("HELLO"))
    for timeout in (0, 0.001):
        with pytest.raises(TimeoutError):
            api.wait(stream, timeout)
    for timeout in (-1, math.nan):
        with refused(Code.INVALID_ARGUMENT, "timeout is"):
            api.wait(stream, timeout)
    with refused(Code.QUEUE_FULL, "1 requests wait already"):
        api.submit(waiting, Request("HELLO"))
    api.cancel(stream)
    assert [chunk.finish_reason for _, chunk in read(api, stream)] == ["cancelled"]
    api.cancel(stream)
    api.stream_close(stream)


def test_a_requests_own_timeout(api, waiting):
    assert answer(api, waiting, Request("HELLO", timeout=0.01))[2] == "timeout"


@pytest.mark.parametrize("how", ["cancel", "stream_close", "close"])
def test_who_waits_is_woken(api, tiny_bundle, how):
    engine = api.open(tiny_bundle.path, {"threads": 1, **WAITS})
    stream = api.submit(engine, Request("HELLO"))

    def wait(_: int) -> str:
        return api.wait(stream, math.inf)[1].finish_reason

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_threads, wait, 1)
        with pytest.raises(TimeoutError):
            api.wait(stream, 0.1)  # by now the other most likely waits; right also if it does not
        {"cancel": api.cancel, "stream_close": api.stream_close}.get(how, lambda _: api.close(engine))(stream)
        outcomes = ["cancelled", Code.INVALID_HANDLE] if how == "stream_close" else ["cancelled"]
        assert waiting.result(60)[0] in outcomes
    if how != "stream_close":
        assert api.wait(stream, 60) is None
        api.stream_close(stream)
    if how != "close":
        api.close(engine)


def test_threads_with_cancellations(api, engine, truth):
    request = Request("HELLO", SamplingParams(max_tokens=30, ignore_eos=True))
    expected = truth.generate([request])[0].token_ids

    def serve(number: int) -> list[str]:
        outcomes = []
        for turn in range(4):
            stream = api.submit(engine, request)
            choice, first = api.wait(stream, 60)
            if cancelled := (turn + number) % 2:
                api.cancel(stream)
            chunks = [first, *(chunk for _, chunk in read(api, stream))]
            tokens = tuple(t for chunk in chunks for t in chunk.token_ids)
            assert tokens == expected[: len(tokens)]
            assert choice == 0
            assert cancelled or tokens == expected
            outcomes.append(chunks[-1].finish_reason)
            api.stream_close(stream)
        return outcomes

    outcomes = [outcome for result in in_threads(serve) for outcome in result]
    assert len(outcomes) == 4 * THREADS
    assert set(outcomes) <= {"length", "cancelled"}


def test_a_failed_request_says_so_once(api, make_bundle, tiny_model, cpu_plugin, tmp_path):
    model = tiny_model()
    graph = onnx.load(model.path)
    head = next(tensor for tensor in graph.graph.initializer if tensor.name == "head")
    broken = np.full(onnx.numpy_helper.to_array(head).shape, np.nan, np.float32)
    head.CopyFrom(onnx.numpy_helper.from_array(broken, "head"))
    onnx.save(graph, tmp_path / "broken.onnx")
    bundle = make_bundle(tmp_path / "broken.onnx", model.decoder, cpu_plugin)
    engine = api.open(bundle.path)
    stream = api.submit(engine, Request((1, 2)))
    with refused(Code.REQUEST_FAILED, "the request failed after 0 tokens"):
        api.wait(stream, 60)
    assert api.wait(stream, 60) is None
    api.stream_close(stream)
    with refused(Code.INVALID_ARGUMENT, "has no tokenizer"):
        api.tokenize(engine, "A")
    api.close(engine)


def test_infer(api, engine, twice_bundle):
    model = api.open(twice_bundle.path)
    assert api.describe(model)["kind"] == "model"
    x = np.linspace(0, 1, 7, dtype=np.float32)
    (name, twice), *rest = api.infer(model, {"x": x}, lane="batch", timeout=60.0).items()
    assert (name, rest, twice.dtype) == ("twice", [], np.float32)
    np.testing.assert_array_equal(twice, 2 * x)
    results = in_threads(lambda number: api.infer(model, {"x": x + number})["twice"])
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result, 2 * (x + number))
    for wrong in ({"y": x}, {"x": x.astype(np.int64)}, {"x": x.reshape(1, 7)}, {"x": x.view("S4")}):
        with refused(Code.INVALID_ARGUMENT, "x|y"):
            api.infer(model, wrong)
    with refused(Code.INVALID_ARGUMENT, "use infer"):
        api.submit(model, Request((1,)))
    with refused(Code.INVALID_ARGUMENT, "not infer"):
        api.infer(engine, {"x": x})
    api.close(model)


def calls(api, engine, stream) -> dict[str, Callable[[], object]]:
    """Every function that takes a handle."""
    return {
        "describe": lambda: api.describe(engine),
        "metrics": lambda: api.metrics(engine),
        "tokenize": lambda: api.tokenize(engine, "A"),
        "tokenize_chat": lambda: api.tokenize_chat(engine, []),
        "detokenize": lambda: api.detokenize(engine, [1]),
        "submit": lambda: api.submit(engine, Request("A")),
        "infer": lambda: api.infer(engine, {"x": np.ones(2, np.float32)}),
        "wait": lambda: api.wait(stream, 0),
        "cancel": lambda: api.cancel(stream),
        "stream_close": lambda: api.stream_close(stream),
        "close": lambda: api.close(engine),
    }


@pytest.mark.parametrize("wrong", ["null", "garbage", "of the other kind", "closed"])
def test_every_function_refuses_wrong_handles_from_any_thread(api, tiny_bundle, wrong):
    opened = api.open(tiny_bundle.path, {"threads": 1})
    stream = api.submit(opened, Request("A", SamplingParams(max_tokens=1)))
    if wrong == "closed":
        api.stream_close(stream)
        api.close(opened)
        handles = opened, stream
    else:
        handles = {"null": (0, 0), "garbage": (GARBAGE, GARBAGE), "of the other kind": (stream, opened)}[wrong]
    message = {"null": "is null", "of the other kind": "of another kind"}.get(wrong, "closed already or never")
    for call in calls(api, *handles).values():
        with refused(Code.INVALID_HANDLE, message):
            call()
        assert in_threads(lambda _, call=call: call()) == [Code.INVALID_HANDLE] * THREADS
    if wrong != "closed":  # the good ones are as they were
        assert read(api, stream)
        api.stream_close(stream)
        api.close(opened)


def test_of_many_threads_that_close_one_succeeds(api, tiny_bundle):
    engine = api.open(tiny_bundle.path, {"threads": 1})
    stream = api.submit(engine, Request("A"))
    for close in (lambda _: api.stream_close(stream), lambda _: api.close(engine)):
        assert sorted(map(str, in_threads(close))) == sorted(["None", *[str(Code.INVALID_HANDLE)] * (THREADS - 1)])


def test_release_knows_what_was_lent(api, engine):
    api.release(0)
    for address in (GARBAGE, engine):
        with refused(Code.INVALID_ARGUMENT, "not there to be released"):
            api.release(address)


def test_open_says_what_is_wrong(api, tiny_bundle, tmp_path):
    with refused(Code.BAD_BUNDLE, "nowhere"):
        api.open(tmp_path / "nowhere")
    for options, message in (
        ({"max_runing": 3}, "options has 'max_runing'; expected some of .*max_running"),
        ({"max_running": "3"}, "the option max_running is '3'"),
        ({"max_running": 0}, "max_running is 0; expected at least 1"),
        ([1], "expected a JSON object"),
    ):
        with refused(Code.INVALID_ARGUMENT, message):
            api.open(tiny_bundle.path, options)
    with refused(Code.INVALID_ARGUMENT, "Python runs in this process already"):
        api.open(tiny_bundle.path, python_executable="/usr/bin/python")
    results = in_threads(lambda _: api.open(tmp_path / "nowhere"))
    assert results == [Code.BAD_BUNDLE] * THREADS
