"""The CPU kernel, through onnxruntime, against the float64 reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from plugins.paged_attention.reference import Attributes, Inputs, attention, quantized, unpacked, written

from .conftest import STATE, Case, Operator, Sequence, cases, state_of

TOLERANCE = 1e-5  # max|out - ref| / max|ref|
# With bfloat16 operands. The kernel's FP32 scores now and then round a weight to the other of two neighbours, which
# moves a head by at most a bfloat16 spacing; most numbers see little of that.
TOLERANCE_BFLOAT16, TYPICAL_BFLOAT16 = 2.0**-7, 1e-4
DECODE_ROWS = 16  # up to so many query rows per KV head, and for one token, bfloat16 is not used
# Explaining a failure would cost more runs than finding it.
SETTINGS = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
ATTRIBUTES = Attributes(num_heads=6, kv_num_heads=2, do_rotary=1)
MIXED = Case(
    seed=1,
    sequences=(Sequence(1, 700), Sequence(0, 3), Sequence(150, 0), Sequence(40, 333), Sequence(3, 90), Sequence(1, 0)),
    attributes=ATTRIBUTES,
    head_dim=64,
    block_size=16,
    key_dtype="float32",
    value_dtype="float32",
    rotary_dim=64,
)


def check_output(output: np.ndarray, written: Inputs, attributes: Attributes) -> None:
    """`written`: the inputs with the caches as the kernel left them, so that storage rounding is the same."""
    expected = attention(written, attributes)
    assert output.shape == expected.shape
    assert output.dtype == np.float32
    if not expected.size:
        return
    assert not np.isnan(output).any(), "NaN leaked from slots that no token may read, or was never written"
    if attributes.compute_dtype == 1:
        rounded = in_bfloat16(written, attributes)
        errors = np.abs(output - expected)[rounded] / np.abs(expected).max()
        if errors.size:
            assert errors.max() <= TOLERANCE_BFLOAT16, f"error {errors.max():.2e}"
            assert np.median(errors) <= TYPICAL_BFLOAT16, f"median {np.median(errors):.2e}"
        expected = attention(written, replace(attributes, compute_dtype=0))[~rounded]
        output = output[~rounded]
    if expected.size:
        error = np.abs(output - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCE, f"error {error:.2e}"


def in_bfloat16(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    """[tokens]: whether a token's sequence has so many new ones that the kernel rounds its operands."""
    new = np.diff(inputs.cumulative_sequence_length)
    many = (new > 1) & (new * (attributes.num_heads // attributes.kv_num_heads) > DECODE_ROWS)
    return np.repeat(many, new)


def check_caches(after: Inputs, before: Inputs, attributes: Attributes) -> None:
    """Slots written within one rounding of the reference, all others bit for bit as they were; values exactly."""
    expected = written(before, attributes)
    slots = np.zeros(before.key_cache.shape[:2], bool)
    slots.reshape(-1)[before.slot_mapping[before.slot_mapping >= 0]] = True
    for name in (STATE[output] for output in state_of(before)):
        found, untouched, wanted = (getattr(inputs, name) for inputs in (after, before, expected))
        assert found[~slots].tobytes() == untouched[~slots].tobytes(), name
        # Rotation is done in FP32, so a value next to a rounding boundary may land on its other side.
        relative = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 0}[str(found.dtype)]
        absolute = 1 if found.dtype == np.int8 else 1e-6
        a, b = found[slots].astype(np.float64), wanted[slots].astype(np.float64)
        assert (np.abs(a - b) <= relative * np.abs(b) + absolute).all(), name
    assert after.value_cache.tobytes() == expected.value_cache.tobytes(), "values are stored as they are, rounded once"
    if before.v_scale is not None:
        assert after.v_scale.tobytes() == expected.v_scale.tobytes()


def own_state(inputs: Inputs) -> Inputs:
    """The same with copies of caches and scales, for a call to write to."""
    return replace(inputs, **{STATE[output]: array.copy() for output, array in state_of(inputs).items()})


@SETTINGS
@given(case=cases())
def test_in_place_call_equals_reference(operator: Operator, isa: str, case: Case) -> None:
    before = case.inputs()
    inputs = own_state(before)
    output = operator.run_in_place(inputs, case.attributes)
    check_output(output, inputs, case.attributes)
    check_caches(inputs, before, case.attributes)


@settings(SETTINGS, max_examples=30)
@given(case=cases())
def test_plain_run_leaves_its_inputs_alone(operator: Operator, case: Case) -> None:
    inputs, untouched = case.inputs(), case.inputs()
    output, after = operator.run(inputs, case.attributes)
    for name, array in state_of(inputs).items():
        assert array.tobytes() == state_of(untouched)[name].tobytes()
    check_output(output, after, case.attributes)
    check_caches(after, untouched, case.attributes)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 31, 40, 65, 100, 144, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_any_head_size(operator: Operator, isa: str, head_dim: int, dtype: str) -> None:
    case = replace(MIXED, head_dim=head_dim, rotary_dim=head_dim // 2 * 2, key_dtype=dtype, value_dtype=dtype)
    case = replace(case, attributes=replace(ATTRIBUTES, do_rotary=int(head_dim > 1)))
    inputs = case.inputs()
    check_output(operator.run_in_place(inputs, case.attributes), inputs, case.attributes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_storing_rounds_to_nearest_even(operator: Operator, isa: str, dtype: str) -> None:
    """Ties, subnormals, overflow, infinities and NaN, as ml_dtypes and numpy round them."""
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    patterns[1::2] &= 0xFFFF_F000  # many exact ties
    patterns[:512] = (patterns[:512] & 0x8FFF_FFFF) | 0x3000_0000  # around half precision's subnormals
    value = patterns.view(np.float32).reshape(64, 64)
    case = replace(MIXED, sequences=(Sequence(64, 0),), key_dtype=dtype, value_dtype=dtype)
    case = replace(case, attributes=Attributes(num_heads=1, kv_num_heads=1))
    inputs = replace(case.inputs(), value=value)
    operator.run_in_place(inputs, case.attributes)
    flat = inputs.value_cache.reshape(-1, 64)[inputs.slot_mapping]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = value.astype(flat.dtype)
    np.testing.assert_array_equal(flat.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_stored_number_is_read_exactly(operator: Operator, isa: str, dtype: str) -> None:
    """All 65536 patterns, read back as the value of a context of one token, by both paths."""
    for tokens in (1, 8):  # decode, prefill
        case = replace(MIXED, sequences=tuple(Sequence(tokens, 0, tokens) for _ in range(256)), block_size=8)
        case = replace(case, head_dim=256, attributes=Attributes(num_heads=1, kv_num_heads=1, local_window_size=1))
        inputs = replace(case, key_dtype=dtype, value_dtype=dtype).inputs()
        values = inputs.value_cache.view(np.uint16)
        values[:] = 0
        values[inputs.block_table[:, 0], 0, 0] = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        output = operator.run_in_place(inputs, case.attributes)
        stored = inputs.value_cache[inputs.block_table[:, 0], 0, 0].astype(np.float32)
        np.testing.assert_array_equal(output[::tokens], stored)


def test_int8_rows_round_as_the_reference_does(operator: Operator, isa: str) -> None:
    """Ties, zeros, subnormals, the largest numbers, infinities and NaN, each row with its own scale."""
    rng = np.random.default_rng(3)
    value = rng.standard_normal((64, 64)).astype(np.float32) * 10.0 ** rng.integers(-45, 39, (64, 1)).astype(np.float32)
    value[0], value[1], value[2] = 0, np.arange(64) - 32.5, np.finfo(np.float32).max
    value[1, 0] = 127  # so that the scale is 1, and all others are ties
    value[3, 5], value[4, 60] = np.nan, -np.inf
    case = replace(MIXED, sequences=(Sequence(64, 0),), key_dtype="int8", value_dtype="int8")
    case = replace(case, attributes=Attributes(num_heads=1, kv_num_heads=1))
    inputs = replace(case.inputs(), value=value, key=value)
    operator.run_in_place(inputs, case.attributes)
    where = np.divmod(inputs.slot_mapping, 16)
    levels, scales = quantized(value)
    for cache, scale in ((inputs.key_cache, inputs.k_scale), (inputs.value_cache, inputs.v_scale)):
        np.testing.assert_array_equal(cache[where][:, 0], levels)
        np.testing.assert_array_equal(scale[where][:, 0], scales)
    assert scales[0] == 0
    assert np.isnan(scales[3:5]).all()


@pytest.mark.parametrize("compute", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_that_see_nan_are_nan_and_no_others(operator: Operator, isa: str, compute: int, dtype: str) -> None:
    """A row depends only on positions that it attends to, even within one tile and one pair of bfloat16 numbers."""
    for new, past in ((3, 40), (150, 20), (151, 21)):
        for window in (-1, 9):
            attributes = replace(ATTRIBUTES, local_window_size=window, compute_dtype=compute)
            case = replace(MIXED, sequences=(Sequence(new, past, new),), attributes=attributes)
            inputs = replace(case, key_dtype=dtype, value_dtype=dtype).inputs()
            bad = past + new // 2
            block = inputs.block_table[0, bad // 16]
            for array in (
                (inputs.key_cache, inputs.value_cache) if dtype != "int8" else (inputs.k_scale, inputs.v_scale)
            ):
                array[block, bad % 16] = np.nan
            output = operator.run_in_place(inputs, attributes)
            position = past + np.arange(new)
            sees = (position >= bad) & ((position < bad + window) if window > 0 else True)
            np.testing.assert_array_equal(np.isnan(output).all(axis=1), sees)
            np.testing.assert_array_equal(np.isnan(output).any(axis=1), sees)


def test_large_scores_do_not_overflow(operator: Operator, isa: str) -> None:
    """Scores of several thousand, and -infinity: the running maximum keeps every weight at most 1."""
    inputs = MIXED.inputs()
    inputs = replace(inputs, query=inputs.query * np.float32(1000))
    output = operator.run_in_place(inputs, ATTRIBUTES)
    expected = attention(inputs, ATTRIBUTES)
    # The rounding of a score grows with the score, and the weights with it: 5000 * 2^-24 per unit of score.
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("compute", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_sequence_gets_the_same_bits_alone_as_in_any_batch(
    operator: Operator, isa: str, compute: int, dtype: str
) -> None:
    inputs = replace(MIXED, key_dtype=dtype, value_dtype=dtype).inputs()
    attributes = replace(ATTRIBUTES, compute_dtype=compute)
    together = operator.run(inputs, attributes)[0]
    for threads in (1, 3):
        assert operator.run(inputs, attributes, threads)[0].tobytes() == together.tobytes()
    bounds = inputs.cumulative_sequence_length
    for seq, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = replace(
            inputs,
            query=inputs.query[begin:end].copy(),
            key=inputs.key[begin:end].copy(),
            value=inputs.value[begin:end].copy(),
            cumulative_sequence_length=np.array([0, end - begin], np.int32),
            past_seqlens=inputs.past_seqlens[seq : seq + 1].copy(),
            block_table=inputs.block_table[seq : seq + 1].copy(),
            slot_mapping=inputs.slot_mapping[begin:end].copy(),
        )
        assert operator.run(alone, attributes)[0].tobytes() == together[begin:end].tobytes()


@pytest.mark.parametrize("head_dim", [1, 7, 33, 64, 80, 256])
def test_bfloat16_rounds_as_the_reference_does(operator: Operator, isa: str, head_dim: int) -> None:
    """Rows equal the reference with rounded operands far more closely than the one without."""
    attributes = Attributes(num_heads=6, kv_num_heads=2, compute_dtype=1)
    inputs = replace(MIXED, sequences=(Sequence(141, 150),), head_dim=head_dim, attributes=attributes).inputs()
    output = operator.run_in_place(inputs, attributes)
    check_output(output, inputs, attributes)
    exact = attention(inputs, replace(attributes, compute_dtype=0))
    assert np.median(np.abs(output - exact)) > 2 * TYPICAL_BFLOAT16 * np.abs(exact).max()


def test_bfloat16_weights_sum_to_one(operator: Operator, isa: str) -> None:
    """The softmax divides by the sum of the weights as they were rounded: equal values come out as they are."""
    attributes = Attributes(num_heads=6, kv_num_heads=2, compute_dtype=1)
    inputs = replace(MIXED, sequences=(Sequence(300, 0),), attributes=attributes).inputs()
    inputs = replace(inputs, value=np.full_like(inputs.value, 1.5))
    output = operator.run_in_place(inputs, attributes)
    np.testing.assert_allclose(output, 1.5, rtol=3e-6)


def test_no_tokens_at_all(operator: Operator) -> None:
    case = replace(MIXED, sequences=(Sequence(0, 5), Sequence(0, 0)))
    inputs = case.inputs()
    output, after = operator.run(inputs, ATTRIBUTES)
    assert output.shape == (0, 6 * 64)
    assert after.key_cache.tobytes() == inputs.key_cache.tobytes()


def test_sets_of_instructions_can_be_chosen(operator: Operator) -> None:
    assert operator.use_isa(1) == 1
    assert operator.use_isa(6) == -1
    assert operator.use_isa(0) >= 1


@settings(SETTINGS, max_examples=20)
@given(case=cases())
def test_packed_operands_give_the_same_bits(operator: Operator, isa: str, case: Case) -> None:
    """Query, key and value side by side in one tensor, as one projection yields them."""
    inputs = case.inputs()
    packed = replace(inputs, query=np.hstack([inputs.query, inputs.key, inputs.value]), key=None, value=None)
    found, expected = operator.run(packed, case.attributes), operator.run(inputs, case.attributes)
    assert found[0].tobytes() == expected[0].tobytes()
    for name, array in state_of(found[1]).items():
        assert array.tobytes() == state_of(expected[1])[name].tobytes()
    split = unpacked(packed, case.attributes)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(getattr(split, name), getattr(inputs, name))
