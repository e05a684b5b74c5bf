"""The CPU kernel, through onnxruntime, against the float64 reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from plugins.paged_attention.reference import Attributes, Inputs, attention, unpacked, written_caches

from .conftest import Case, Operator, Sequence, cases

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


def check_cache(after: np.ndarray, before: np.ndarray, expected: np.ndarray, slots: np.ndarray) -> None:
    """Slots written within one rounding of the reference, all others bit for bit as they were."""
    after, before, expected = (c.reshape(c.shape[0] * c.shape[1], *c.shape[2:]) for c in (after, before, expected))
    written = np.zeros(len(after), bool)
    written[slots[slots >= 0]] = True
    assert after[~written].tobytes() == before[~written].tobytes()
    # Rotation is done in FP32, so a value next to a rounding boundary may land on its other side.
    spacing = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}[str(after.dtype)]
    found, wanted = after[written].astype(np.float64), expected[written].astype(np.float64)
    assert (np.abs(found - wanted) <= spacing * np.abs(wanted) + 1e-6).all()


@SETTINGS
@given(case=cases())
def test_in_place_call_equals_reference(operator: Operator, isa: str, case: Case) -> None:
    before = case.inputs()
    inputs = replace(before, key_cache=before.key_cache.copy(), value_cache=before.value_cache.copy())
    output = operator.run_in_place(inputs, case.attributes)
    check_output(output, inputs, case.attributes)
    keys, values = written_caches(before, case.attributes)
    check_cache(inputs.key_cache, before.key_cache, keys, before.slot_mapping)
    check_cache(inputs.value_cache, before.value_cache, values, before.slot_mapping)
    assert inputs.value_cache.tobytes() == values.tobytes(), "values are stored as they are, rounded once"


@settings(SETTINGS, max_examples=30)
@given(case=cases())
def test_plain_run_leaves_its_inputs_alone(operator: Operator, case: Case) -> None:
    inputs, untouched = case.inputs(), case.inputs()
    output, keys, values = operator.run(inputs, case.attributes)
    assert inputs.key_cache.tobytes() == untouched.key_cache.tobytes()
    assert inputs.value_cache.tobytes() == untouched.value_cache.tobytes()
    check_output(output, replace(inputs, key_cache=keys, value_cache=values), case.attributes)
    expected = written_caches(inputs, case.attributes)
    check_cache(keys, untouched.key_cache, expected[0], inputs.slot_mapping)
    check_cache(values, untouched.value_cache, expected[1], inputs.slot_mapping)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 31, 40, 65, 100, 144, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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


@pytest.mark.parametrize("compute", [0, 1])
def test_rows_that_see_nan_are_nan_and_no_others(operator: Operator, isa: str, compute: int) -> None:
    """A row depends only on positions that it attends to, even within one tile and one pair of bfloat16 numbers."""
    for new, past in ((3, 40), (150, 20), (151, 21)):
        for window in (-1, 9):
            attributes = replace(ATTRIBUTES, local_window_size=window, compute_dtype=compute)
            case = replace(MIXED, sequences=(Sequence(new, past, new),), attributes=attributes)
            inputs = case.inputs()
            bad = past + new // 2
            block = inputs.block_table[0, bad // 16]
            inputs.value_cache[block, bad % 16] = np.nan
            inputs.key_cache[block, bad % 16] = np.nan
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
def test_a_sequence_gets_the_same_bits_alone_as_in_any_batch(operator: Operator, isa: str, compute: int) -> None:
    inputs, attributes = MIXED.inputs(), replace(ATTRIBUTES, compute_dtype=compute)
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
    output, keys, _ = operator.run(inputs, ATTRIBUTES)
    assert output.shape == (0, 6 * 64)
    assert keys.tobytes() == inputs.key_cache.tobytes()


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
    for found, expected in zip(
        operator.run(packed, case.attributes), operator.run(inputs, case.attributes), strict=True
    ):
        assert found.tobytes() == expected.tobytes()
    split = unpacked(packed, case.attributes)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(getattr(split, name), getattr(inputs, name))
