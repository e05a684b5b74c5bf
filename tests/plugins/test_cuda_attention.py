"""The CUDA kernels of paged attention against the float64 reference, on a CUDA device."""

from dataclasses import replace

import numpy as np
import pytest

from plugins.errors import KilnError
from plugins.paged_attention import reference
from plugins.paged_attention.cuda_calls import MEASURED, CudaAttention
from plugins.paged_attention.reference import Attributes

from .conftest import Case, Sequence
from .cuda_operands import (
    DECODE,
    INDICES,
    PREFILL,
    check,
    check_output,
    expected_output,
    of_type,
    on_device,
    on_host,
    poisoned,
)
from .cuda_tensors import loaded_library, torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case(
    seed=1,
    sequences=(
        *(Sequence(1, 700), Sequence(0, 3), Sequence(150, 0), Sequence(40, 333), Sequence(3, 90)),
        *(Sequence(1, 0), Sequence(5, 1000), Sequence(260, 17)),
    ),
    attributes=Attributes(num_heads=6, kv_num_heads=2),
    head_dim=128,
    block_size=16,
    key_dtype="float16",
    value_dtype="float16",
    rotary_dim=128,
)


@pytest.fixture(scope="module", params=["best", "portable"])
def operator(request: pytest.FixtureRequest) -> CudaAttention:
    return CudaAttention(loaded_library(), portable=request.param == "portable")


@pytest.mark.parametrize("decode_rows", [MEASURED, DECODE, PREFILL])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_size_on_every_path(operator: CudaAttention, dtype: str, head_dim: int, decode_rows: int) -> None:
    check(operator, replace(CASE, head_dim=head_dim, rotary_dim=head_dim), dtype, decode_rows)


@pytest.mark.parametrize("decode_rows", [MEASURED, DECODE, PREFILL])
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "softcap", "rotary_dim", "interleaved", "packed"),
    [
        ((4, 4), 32, -1, 0.0, 128, 0, True),
        ((14, 2), 64, 33, 0.0, 64, 1, False),
        ((16, 1), 16, 200, 30.0, 128, 0, True),
        ((24, 2), 128, 5, 2.0, 32, 0, False),
        ((5, 1), 16, 1, 0.0, 128, 1, True),
        ((6, 2), 48, -1, 0.0, 20, 0, False),  # a rotated part that no vector of 8 divides
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_options(
    operator: CudaAttention,
    dtype: str,
    heads: tuple[int, int],
    block_size: int,
    window: int,
    softcap: float,
    rotary_dim: int,
    interleaved: int,
    packed: bool,
    decode_rows: int,
) -> None:
    attributes = Attributes(*heads, 0.0, softcap, window, 1, interleaved)
    case = replace(CASE, attributes=attributes, block_size=block_size, rotary_dim=rotary_dim, seed=block_size)
    check(operator, case, dtype, decode_rows, packed)


def test_slots_of_minus_one_are_not_written(operator: CudaAttention) -> None:
    sequences = (Sequence(1, 40, 1), Sequence(70, 20, 30), Sequence(4, 9, 2), Sequence(60, 0, 60))
    check(operator, replace(CASE, sequences=sequences), "float16")


def test_sequences_may_share_blocks(operator: CudaAttention) -> None:
    sequences = tuple(Sequence(new, past) for new, past in ((1, 100), (1, 97), (20, 90), (2, 111)))
    check(operator, replace(CASE, sequences=sequences, shared_blocks=5), "bfloat16")


def test_many_short_sequences_and_a_long_one(operator: CudaAttention) -> None:
    lengths = np.random.default_rng(5).integers(0, 60, 150)
    sequences = (*(Sequence(1, int(length)) for length in lengths), Sequence(1, 9000))
    check(operator, replace(CASE, sequences=sequences, attributes=Attributes(2, 1)), "bfloat16")


def test_tokens_of_no_sequence_are_left_alone(operator: CudaAttention) -> None:
    """Padding of a CUDA graph: tokens beyond the last sequence's, and sequences without tokens."""
    inputs = of_type(replace(CASE, sequences=(Sequence(1, 30), Sequence(1, 5), Sequence(2, 7))), "float16")
    operands = on_device(replace(inputs, cumulative_sequence_length=np.array([0, 1, 2, 2], np.int32)))
    output = poisoned(operands, CASE.attributes)
    operator(operands, CASE.attributes, output)
    assert not output[:2].isnan().any()
    assert output[2:].isnan().all()
    slots = inputs.slot_mapping[2:]
    assert on_host(operands.value_cache, inputs.value_cache).reshape(-1, 2, 128)[slots].tobytes() == (
        inputs.value_cache.reshape(-1, 2, 128)[slots].tobytes()
    )


def test_a_captured_graph_follows_the_lengths(operator: CudaAttention) -> None:
    """One graph, replayed with other lengths, block tables and slots: nothing about them is fixed at capture."""
    sequences = tuple(Sequence(1, past) for past in (500, 3, 90))
    captured = on_device(of_type(replace(CASE, sequences=sequences), "float16"))
    output = poisoned(captured, CASE.attributes)
    operator(captured, CASE.attributes, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(captured, CASE.attributes, output)
    lengths = tuple(Sequence(1, past) for past in (120, 455, 17))  # as many blocks, so that shapes agree
    case = replace(CASE, sequences=lengths, seed=9)
    inputs = of_type(case, "float16")
    fresh = on_device(inputs)
    for name in ("query", "key", "value", *INDICES[1:2], INDICES[3]):
        getattr(captured, name).copy_(getattr(fresh, name))
    table = torch.zeros_like(captured.block_table)
    width = min(table.shape[1], fresh.block_table.shape[1])
    table[:, :width] = fresh.block_table[:, :width]
    captured.block_table.copy_(table)
    blocks = min(len(captured.key_cache), len(fresh.key_cache))
    assert blocks == len(fresh.key_cache)
    captured.key_cache[:blocks] = fresh.key_cache
    captured.value_cache[:blocks] = fresh.value_cache
    output.fill_(float("nan"))
    graph.replay()
    expected = expected_output(reference.written(inputs, case.attributes), case.attributes, "float16")
    check_output(output, expected, "float16")


def test_equal_calls_give_equal_bits(operator: CudaAttention) -> None:
    """Also that scratch memory is left as it was found: a split sequence is joined once, by whoever comes last."""
    operands = on_device(of_type(replace(CASE, sequences=(Sequence(1, 5000), Sequence(40, 800))), "bfloat16"))
    outputs = [poisoned(operands, CASE.attributes) for _ in range(20)]
    for output in outputs:
        operator(operands, CASE.attributes, output)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_wrong_numbers_touch_nothing_foreign(operator: CudaAttention) -> None:
    inputs = of_type(CASE, "float16")
    wrong = {
        "block_table": np.where(inputs.block_table % 2, 2**30, -(2**30)).astype(np.int32),
        "past_seqlens": inputs.past_seqlens + 2**29,
        "slot_mapping": inputs.slot_mapping + 2**29,
        "cumulative_sequence_length": inputs.cumulative_sequence_length[::-1].copy() * 1000,
    }
    for name, array in wrong.items():
        operands = on_device(replace(inputs, **{name: array}))
        operator(operands, CASE.attributes, poisoned(operands, CASE.attributes))
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80, "rotary_dim": 80}, "expected 64, 96, 128 or 256"),
        ({"block_size": 8}, "expected a multiple of 16"),
        ({"rotary_dim": 30, "attributes": replace(CASE.attributes, do_rotary=1)}, "expected an even one"),
        ({"attributes": replace(CASE.attributes, scale=-1.0)}, "positive scale"),
    ],
)
def test_what_cannot_be_done_is_refused(operator: CudaAttention, change: dict, message: str) -> None:
    case = replace(CASE, **change)
    operands = on_device(of_type(case, "float16"))
    with pytest.raises(KilnError, match=message):
        operator(operands, case.attributes, poisoned(operands, case.attributes))
