"""Operations and bytes of single operator calls against arithmetic done by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.operator_work import ITEMSIZE, Arithmetic, LowBitProduct, SequenceStep, call_work, product_operations


def call(
    name: str,
    inputs: list[tuple[str, list[int]]],
    output: list[int],
    parameters: int = 0,
    activations: int = 0,
    kind: str = "float",
) -> dict[str, Any]:
    return {
        "op_name": name,
        "input_type_shape": [{kind: shape} for kind, shape in inputs],
        "output_type_shape": [{kind: output}],
        "parameter_size": str(parameters),
        "activation_size": str(activations),
        "output_size": str(ITEMSIZE[kind] * _elements(output)),
    }


def _elements(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@pytest.mark.parametrize(
    ("name", "inputs", "output", "operations", "rows"),
    [
        ("MatMul", [[2, 5, 7], [7, 3]], [2, 5, 3], 2 * 10 * 7 * 3, 10),
        ("Gemm", [[7, 4], [3, 7]], [4, 3], 2 * 4 * 7 * 3, 4),  # the first operand is transposed
        ("Conv", [[2, 4, 9, 9], [6, 2, 3, 3]], [2, 6, 9, 9], 2 * (2 * 6 * 81) * 18, 2 * 81),
        ("Int8MatMul", [[4, 64], [4, 1], [4096]], [4, 48], 2 * 4 * 64 * 48, 4),
    ],
)
def test_products_by_hand(name: str, inputs: list[list[int]], output: list[int], operations: int, rows: int) -> None:
    work = call_work(call(name, [("float", shape) for shape in inputs], output, 100, 200))
    assert (work.operations, work.rows) == (operations, rows)
    assert (work.weights, work.activations) == (100, 200 + 4 * _elements(output))
    assert work.arithmetic == ("int8" if name == "Int8MatMul" else "fp32")


def test_what_is_no_product_counts_its_elements_and_a_view_nothing() -> None:
    assert product_operations(call("Add", [("float", [3, 4])], [3, 4])) is None
    assert call_work(call("Add", [("float", [3, 4])], [3, 4], 0, 96)).operations == 12
    view = call_work(call("Reshape", [("float", [3, 4])], [12], 16, 48))
    assert (view.operations, view.bytes) == (0, 0)


def test_a_table_is_read_where_its_rows_come_out() -> None:
    work = call_work(call("Gather", [("float", [1000, 8]), ("int64", [3])], [3, 8], 32000, 24))
    assert work.weights == 3 * 8 * 4


def test_attention_reads_each_sequences_cache_once() -> None:
    inputs = [("float", [3, 64]), ("float", [5, 16, 2, 8]), ("float16", [5, 16, 2, 8]), ("int32", [3])]
    sequences = [SequenceStep(2, 10), SequenceStep(1, 4)]
    work = call_work(call("PagedAttention", inputs, [3, 32], 0, 10**6), sequences)
    assert work.operations == 4 * 32 * (11 + 12 + 5)
    assert work.cache == (12 + 2 + 5 + 1) * (16 * 4 + 16 * 2)
    assert work.activations == 4 * 3 * (64 + 32)


@given(st.integers(1, 40), st.integers(0, 40), st.none() | st.integers(1, 60))
def test_pairs_and_reach_are_those_of_a_mask(new: int, past: int, window: int | None) -> None:
    seen = {
        (query, key)
        for query in range(past, past + new)
        for key in range(query + 1)
        if window is None or key > query - window
    }
    step = SequenceStep(new, past)
    assert step.pairs(window) == len(seen)
    assert step.reach(window) == len({key for _, key in seen})


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_products_of_16_bits_on_a_gpu(half: str) -> None:
    """Weights lie as [width, depth]; the gated one makes one output of two products."""
    one = call_work(call("Linear", [(half, [5, 64]), (half, [48, 64])], [5, 48], 48 * 64 * 2, 5 * 64 * 2, half))
    assert (one.operations, one.rows, one.arithmetic) == (2 * 5 * 64 * 48, 5, "16-bit")
    assert (one.weights, one.activations) == (48 * 64 * 2, 5 * 64 * 2 + 5 * 48 * 2)
    gated = call_work(call("LinearSwiGlu", [(half, [5, 64]), (half, [96, 64])], [5, 48], 96 * 64 * 2, 640, half))
    assert (gated.operations, gated.rows, gated.arithmetic) == (2 * one.operations, 5, "16-bit")


@pytest.mark.parametrize(
    ("low_bit", "rows", "arithmetic"),
    [
        (LowBitProduct("int8", 32), 32, "16-bit"),
        (LowBitProduct("int8", 32), 33, "int8"),
        (LowBitProduct("float8e4m3fn", 0), 1, "float8"),
        (LowBitProduct("int4", 32), 4096, "16-bit"),
    ],
)
def test_products_of_fewer_bits_on_a_gpu(low_bit: LowBitProduct, rows: int, arithmetic: Arithmetic) -> None:
    depth, width = 128, 48
    size = width * depth // (2 if low_bit.format == "int4" else 1)
    inputs = [("bfloat16", [rows, depth]), ("uint8", [width, size // width]), ("float", [1, width])]
    found = call_work(call("QuantLinear", inputs, [rows, width], size + 4 * width, 0, "bfloat16"), low_bit=low_bit)
    assert (found.operations, found.rows, found.arithmetic) == (2 * rows * depth * width, rows, arithmetic)
    assert found.weights == size + 4 * width


@pytest.mark.parametrize(("kind", "scales", "row"), [("bfloat16", 0, 2 * 16 * 2), ("int8", 2, 2 * (16 + 2 * 4))])
def test_attention_of_16_bits(kind: str, scales: int, row: int) -> None:
    """Packed queries, keys and values of 3 tokens; two KV heads of 8; rotation tables are constants."""
    tables = [("float", [64, 4]), ("float", [64, 4])]
    caches = [(kind, [5, 16, 2, 8])] * 2 + [("float", [5, 16, 2])] * scales
    inputs = [("bfloat16", [3, 64]), *caches, ("int32", [3]), ("int32", [2, 7]), *tables]
    found = call_work(
        call("PagedAttention", inputs, [3, 32], 2 * 64 * 4 * 4, 10**6, "bfloat16"),
        [SequenceStep(2, 10), SequenceStep(1, 4)],
    )
    assert found.operations == 4 * 32 * (11 + 12 + 5)
    assert found.arithmetic == "16-bit"
    assert found.cache == (12 + 2 + 5 + 1) * row
    assert found.activations == 2 * 3 * (64 + 32)


def test_choosing_tokens_reads_the_logits_and_feeding_them_only_what_it_takes() -> None:
    rows = [("float", [4])] * 3 + [("int32", [4])] * 2 + [("int64", [4])]
    sample = call_work(call("Sample", [("float", [4, 1000]), *rows], [4], 0, 4 * 1000 * 4 + 4 * 28, "int32"))
    assert (sample.operations, sample.rows, sample.arithmetic) == (4000, 0, "fp32")
    assert sample.activations == 4 * 1000 * 4 + 4 * 28 + 4 * 4
    inputs = [("int32", [4]), ("int32", [4]), ("int32", [65536])]
    fed = call_work(call("FeedTokens", inputs, [4], 0, 4 * (8 + 65536), "int32"))
    assert (fed.operations, fed.bytes) == (4, 3 * 4 * 4)
