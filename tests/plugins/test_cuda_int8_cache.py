"""CUDA paged attention over caches of int8, of keys or of keys and values, against the float64 reference."""

from dataclasses import replace

import numpy as np
import pytest

from plugins.paged_attention.cuda_calls import MEASURED, CudaAttention
from plugins.paged_attention.reference import Attributes

from .conftest import Case, Sequence
from .cuda_operands import DECODE, PREFILL, after, check, of_type, on_device, poisoned
from .cuda_tensors import loaded_library, torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case(
    seed=2,
    sequences=(
        *(Sequence(1, 700), Sequence(0, 3), Sequence(150, 0), Sequence(40, 333), Sequence(3, 90)),
        *(Sequence(1, 0), Sequence(5, 1000), Sequence(140, 17)),
    ),
    attributes=Attributes(num_heads=6, kv_num_heads=2, do_rotary=1),
    head_dim=128,
    block_size=16,
    key_dtype="int8",
    value_dtype="int8",
    rotary_dim=128,
)


@pytest.fixture(scope="module", params=["best", "portable"])
def operator(request: pytest.FixtureRequest) -> CudaAttention:
    return CudaAttention(loaded_library(), portable=request.param == "portable")


@pytest.mark.parametrize("decode_rows", [MEASURED, DECODE, PREFILL])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("int8", ["k", "v", "kv"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_size_on_every_path(
    operator: CudaAttention, dtype: str, int8: str, head_dim: int, decode_rows: int
) -> None:
    case = replace(CASE, head_dim=head_dim, rotary_dim=head_dim)
    check(operator, case, dtype, decode_rows, int8=int8)


@pytest.mark.parametrize("decode_rows", [DECODE, PREFILL])
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "softcap", "rotary_dim", "interleaved", "packed"),
    [
        ((14, 2), 64, 33, 0.0, 64, 1, False),
        ((16, 1), 16, 200, 30.0, 128, 0, True),
        ((5, 1), 32, 1, 0.0, 20, 0, True),
    ],
)
def test_options(
    operator: CudaAttention,
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
    check(operator, case, "float16", decode_rows, packed, int8="kv")


def test_slots_of_minus_one_are_not_written(operator: CudaAttention) -> None:
    sequences = (Sequence(1, 40, 1), Sequence(70, 20, 30), Sequence(4, 9, 2), Sequence(60, 0, 60))
    check(operator, replace(CASE, sequences=sequences), "float16", int8="kv")


def test_many_short_sequences_and_a_long_one(operator: CudaAttention) -> None:
    lengths = np.random.default_rng(5).integers(0, 60, 150)
    sequences = (*(Sequence(1, int(length)) for length in lengths), Sequence(1, 9000))
    check(operator, replace(CASE, sequences=sequences, attributes=Attributes(2, 1)), "bfloat16", int8="kv")


@pytest.mark.parametrize("size", [1e-6, 1e-3, 60000.0])
def test_values_of_any_size(operator: CudaAttention, size: float) -> None:
    """Scales have the range of float32: weights times scales must not be lost in a 16-bit type."""
    case = replace(CASE, attributes=Attributes(4, 2), sequences=(Sequence(1, 300), Sequence(70, 30)))
    inputs = of_type(case, "bfloat16", "v")
    assert inputs.v_scale is not None
    assert inputs.value is not None
    shrunk = replace(inputs, value=inputs.value * np.float32(size), v_scale=inputs.v_scale * np.float32(size))
    outputs = []
    for one in (inputs, shrunk):
        operands = on_device(one, dtype="bfloat16")
        output = poisoned(operands, case.attributes)
        operator(operands, case.attributes, output)
        outputs.append(output.double())
    error = (outputs[1] / size - outputs[0]).abs().max() / outputs[0].abs().max()
    assert error < 2.0**-7


def test_what_is_not_finite_is_not_hidden(operator: CudaAttention) -> None:
    """A head of keys or values with a NaN or an infinity, and one of zeros: the scales are NaN and 0."""
    case = replace(CASE, attributes=Attributes(2, 2), sequences=(Sequence(1, 20), Sequence(1, 20), Sequence(70, 9)))
    inputs = of_type(case, "float16", "kv")
    assert inputs.key is not None
    assert inputs.value is not None
    inputs.key[0, 5], inputs.value[1, 200], inputs.value[40, :128] = np.nan, np.inf, 0
    operands = on_device(inputs, dtype="float16")
    output = poisoned(operands, case.attributes)
    operator(operands, case.attributes, output)
    left = after(inputs, operands)
    assert left.k_scale is not None
    assert left.v_scale is not None
    keys, values = (scale.reshape(-1, 2)[inputs.slot_mapping] for scale in (left.k_scale, left.v_scale))
    assert np.isnan(keys[0]).tolist() == [True, False]
    assert np.isnan(values[1]).tolist() == [False, True]
    assert values[40].tolist()[0] == 0
    assert int(np.isnan(keys).sum() + np.isnan(values).sum()) == 2
    heads = output.view(-1, 2, 128).isnan()
    assert heads[0, 0].any()
    assert not heads[0, 1].any()
    assert heads[1, 1].all()
    assert not heads[1, 0].any()
    assert not heads[2:].any()
