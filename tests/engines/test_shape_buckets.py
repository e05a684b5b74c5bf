"""Which requests may share a call, how their arrays are joined and parted, and how a batch is judged."""

import logging

import numpy as np
import pytest

from engines.runtime.batch_check import BatchCheck, needs_padding, relative_error
from engines.runtime.info import TensorInfo
from engines.runtime.shape_buckets import BatchLayout, BatchShapeError, layout_from_tensors

IDS = TensorInfo("input_ids", "int64", ("batch", "sequence"))
MASK = TensorInfo("attention_mask", "int64", ("batch", "sequence"))
HIDDEN = TensorInfo("hidden", "float32", ("batch", "sequence", 2))
POOLED = TensorInfo("pooled", "float32", ("batch", 2))
BUCKETS = (4, 8)


def tensor(name, *shape) -> TensorInfo:
    return TensorInfo(name, "float32", shape)


def texts(*rows_and_lengths) -> list[dict]:
    """Requests of token ids from 1 on, all of them to be attended."""
    return [
        {"input_ids": np.arange(1, rows * length + 1).reshape(rows, length), "attention_mask": np.ones((rows, length))}
        for rows, length in rows_and_lengths
    ]


@pytest.fixture
def encoder() -> BatchLayout:
    return layout_from_tensors((IDS, MASK), (HIDDEN, POOLED))


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "length"),
    [
        ((IDS, MASK), (HIDDEN, POOLED), "batch", "sequence"),
        ((IDS, MASK, tensor("bias", "batch", "sequence", "sequence")), (POOLED,), "batch", "sequence"),
        ((tensor("image", "n", 3, 8, 8),), (tensor("scores", "n", 10),), "n", None),
        ((tensor("image", "n", 3, "height", "width"),), (tensor("scores", "n", 10),), "n", None),
        ((IDS,), (HIDDEN,), "batch", None),  # nothing says what is padding
        ((IDS, MASK), (tensor("halved", "batch", "sequence//2", 2),), "batch", None),
        ((IDS, MASK, tensor("image", "batch", "width")), (POOLED,), "batch", None),
        ((tensor("image", 1, 3, 8, 8),), (tensor("scores", 1, 10),), None, None),
        ((tensor("image", 4, 3, 8, 8),), (tensor("scores", "n", 10),), None, None),
        ((tensor("image", "n", 3, 8, 8),), (tensor("boxes", "found", 4),), None, None),
        ((tensor("window", "n", 512), tensor("state", 2, "n", 128)), (tensor("out", "n", 1),), None, None),
        ((tensor("x", "n", 4), tensor("scale")), (tensor("y", "n", 4),), None, None),
        ((tensor("x", None, 4),), (tensor("y", None, 4),), None, None),
        ((), (tensor("constant", 4),), None, None),
    ],
)
def test_names_of_dimensions_say_what_may_share(inputs, outputs, batch, length):
    layout = layout_from_tensors(inputs, outputs)
    assert (layout.batch, layout.length) == (batch, length)


def test_lengths_of_one_bucket_have_one_key(encoder):
    short, four, five, long, wide = texts((1, 1), (2, 4), (1, 5), (1, 9), (3, 9))
    keys = [encoder.key(request, BUCKETS) for request in (short, four, five, long, wide)]
    assert keys[0] == keys[1] == (4, 4)
    assert keys[2] == (8, 8)
    assert keys[3] == keys[4], "above the last bucket only equal lengths share"
    assert keys[3][1] is None
    assert keys[3] != encoder.key(texts((1, 10))[0], BUCKETS)
    assert encoder.key(short | {"attention_mask": np.ones((1, 3))}, BUCKETS)[1] is None


def test_rows_are_those_of_every_input(encoder):
    (request,) = texts((3, 4))
    assert encoder.rows(request) == 3
    assert encoder.rows(request | {"attention_mask": np.ones((1, 4))}) is None
    assert encoder.rows(texts((0, 4))[0]) is None
    assert layout_from_tensors((tensor("x", 1, 4),), ()).rows({"x": np.ones((1, 4))}) is None


def test_requests_are_joined_with_zeros_behind_and_parted_again(encoder):
    requests = texts((1, 2), (2, 3), (1, 1))
    assert needs_padding(requests)
    joined = encoder.merge(requests)
    assert joined["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3], [4, 5, 6], [1, 0, 0]]
    assert joined["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert [array.dtype for array in joined.values()] == [np.int64, np.float64]
    outputs = {"hidden": np.arange(24.0).reshape(4, 3, 2), "pooled": np.arange(8.0).reshape(4, 2)}
    parts = encoder.part(outputs, requests)
    assert parts[0]["hidden"].tolist() == [[[0, 1], [2, 3]]]
    assert (parts[1]["hidden"] == outputs["hidden"][1:3]).all()
    assert parts[2]["hidden"].tolist() == [[[18, 19]]]
    assert [part["pooled"].tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]], [[6, 7]]]
    assert all(array.base is None for part in parts for array in part.values()), "keeps nobody else's rows alive"


def test_equal_shapes_are_joined_without_padding(encoder):
    requests = texts((2, 3), (1, 3))
    assert not needs_padding(requests)
    assert encoder.merge(requests)["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    assert encoder.merge(requests[:1])["input_ids"] is requests[0]["input_ids"]


@pytest.mark.parametrize("name", ["hidden", "pooled"])
def test_outputs_that_do_not_follow_their_names_are_refused(encoder, name):
    requests = texts((1, 2), (2, 3))
    outputs = {"hidden": np.ones((3, 3, 2)), "pooled": np.ones((3, 2))}
    encoder.part(outputs, requests)
    for wrong in (outputs[name][:2], outputs["hidden"][:, :2]):
        if wrong.ndim == outputs[name].ndim:
            with pytest.raises(BatchShapeError, match=rf"output {name} has shape .*, expected \[3, .* for 3 rows"):
                encoder.part(outputs | {name: wrong}, requests)


def test_relative_error():
    def error(found, expected):
        return relative_error({"y": np.array(found)}, {"y": np.array(expected)})

    assert error([1.0, -4.0], [1.0, -4.0]) == 0
    assert error([1.0, -3.0], [1.0, -4.0]) == 0.25
    assert error(np.float16([1.5]), np.float16([1])) == 0.5
    assert error([0.0], [0.0]) == 0
    assert error([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0]) == 0
    assert error([], []) == 0
    for found, expected in (
        ([1.0], [[1.0]]),
        ([np.nan], [1.0]),
        ([1.0], [np.nan]),
        ([np.inf], [-np.inf]),
        ([1e-9], [0.0]),
        ([1, 2], [1, 3]),
        (["a"], ["b"]),
    ):
        assert error(found, expected) == np.inf, (found, expected)


@pytest.fixture
def check(encoder) -> BatchCheck:
    return BatchCheck(encoder, 1e-3, "tiny")


def results(*values) -> list[dict]:
    return [{"pooled": np.array([[value, 1.0]])} for value in values]


def test_a_batch_is_trusted_after_it_agreed_on_requests_that_differ(check):
    requests = texts((1, 2), (2, 2))
    assert check.allows(False)
    assert not check.trusted(False)
    check.judge(requests, results(0.5, 0.6), results(0.5, 0.6004), padded=False)
    assert check.trusted(False)
    assert not check.trusted(True)
    check.judge(texts((1, 2), (1, 3)), results(0.5, 0.6), results(0.5, 0.6), padded=True)
    assert check.trusted(True)


def test_equal_requests_prove_little(check):
    alike = texts((1, 2), (1, 2))
    for _ in range(7):
        check.judge(alike, results(1, 1), results(1, 1), padded=False)
        assert not check.trusted(False)
    check.judge(alike, results(1, 1), results(1, 1), padded=False)
    assert check.trusted(False), "a benchmark that repeats one request shall not be computed twice for ever"


def test_a_difference_ends_padding_first_and_then_batches(check, caplog):
    caplog.set_level(logging.WARNING)
    requests = texts((1, 2), (1, 3))
    check.judge(requests, results(0.5, 0.7), results(0.5, 0.6), padded=True)
    assert check.allows(False)
    assert not check.allows(True)
    assert check.layout.key(requests[0], BUCKETS) != check.layout.key(requests[1], BUCKETS)
    check.judge(texts((1, 2), (2, 2)), None, results(0.5, 0.6), padded=False)
    assert not check.allows(False)
    assert check.layout.rows(requests[0]) is None
    padding, batches = (record.getMessage() for record in caplog.records)
    assert padding.startswith("tiny: requests of different length are not padded any more: results differ from")
    assert "by 0.1 of the largest value, more than the tolerance of 0.001" in padding
    assert batches.startswith("tiny: requests are run one by one from now on: the model fails on several requests")
