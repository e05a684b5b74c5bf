import math
import pickle

import pytest

from engines.runtime.request import Completion, Guidance, Request, RequestError, SamplingParams
from plugins.errors import KilnError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("min_p", 1.5),
        ("frequency_penalty", 3),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("top_k", 2.0),
        ("max_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", "word"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(field, value):
    with pytest.raises(KilnError, match=rf"^{field} is .*; expected "):
        SamplingParams(**{field: value})


def test_edges_are_valid():
    least = SamplingParams(temperature=0, top_k=1, top_p=1, seed=2**64 - 1, max_tokens=1, stop=("a",), ignore_eos=True)
    assert (least.top_k, least.seed, least.max_tokens) == (1, 2**64 - 1, 1)
    most = SamplingParams(temperature=100.5, top_p=1e-9, seed=0)
    assert (most.temperature, most.top_p, most.seed) == (100.5, 1e-9, 0)


def test_params_are_frozen_and_lists_become_tuples():
    params = SamplingParams(stop=["a", "b"])
    assert params.stop == ("a", "b")
    with pytest.raises(AttributeError):
        params.temperature = 1
    assert Request([1, 2]).prompt == (1, 2)
    assert hash(Request([1, 2])) == hash(Request((1, 2)))


@pytest.mark.parametrize("prompt", [None, 3, [1, "a"], [1.0], [True]])
def test_a_prompt_is_text_or_token_ids(prompt):
    with pytest.raises(KilnError, match="expected text or a sequence of integer token ids"):
        Request(prompt)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"a": 1}, "token id 'a'; expected an integer"),
        ({-1: 1}, "token id -1"),
        ({3: 101}, "of token 3 is 101; expected"),
    ],
)
def test_a_bias_that_makes_no_sense(bias, message):
    with pytest.raises(KilnError, match=message):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lane": "fast"}, "lane is 'fast'; expected one of interactive, batch"),
        ({"timeout": 0}, "timeout is 0; expected None or a positive number"),
        ({"tenant": 3}, "tenant is 3; expected text"),
    ],
)
def test_how_a_request_is_served_is_checked(options, message):
    with pytest.raises(KilnError, match=message):
        Request((1,), **options)


def test_requests_and_their_errors_can_be_sent_to_another_process():
    sampling = SamplingParams(0.5, logit_bias={3: -1.5}, stop=("a",), n=2, guidance=Guidance("regex", "a+"))
    request = Request((1, 2), sampling, lane="batch", timeout=2.0, tenant="t")
    assert pickle.loads(pickle.dumps(request)) == request
    error = RequestError("it failed", Completion((1, 2), "ab", "error", 3))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.completion) == ("it failed", error.completion)
