"""Rows that are quantised, by themselves or at the end of a norm or a gate: to the bit where the reference is exact."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.quant_matmul import reference
from plugins.quant_matmul.schema import ADD_RMS_NORM_QUANTIZE, QUANTIZE_ROWS, SWIGLU_QUANTIZE
from plugins.spec import OperatorSpec

from .conftest import Operator
from .one_node import ISAS, each_isa, normal, run, session

isa = pytest.fixture(params=ISAS)(each_isa)
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHAPES = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.tuples(st.integers(1, 70), st.integers(1, 700)),
    st.sampled_from([(1,), (1, 1, 1), (0, 576), (3, 0), (2, 0, 5), (16, 576), (60, 1536)]),
).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)
GROUPS = st.sampled_from([0, 0, 4, 12, 32, 64, 1024])


def same(found: list[NDArray], expected: tuple[NDArray, ...] | list[NDArray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)  # NaN equals NaN


@SETTINGS
@given(shape=SHAPES, seed=SEEDS, scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e3, 1e37]), group=GROUPS)
@example(shape=(513, 576), seed=0, scale=1.0, group=0)
def test_rows(operator: Operator, isa: str, shape: tuple[int, ...], seed: int, scale: float, group: int) -> None:
    x = normal(seed, *shape, scale=scale)
    same(run(QUANTIZE_ROWS, x, group_size=group), reference.quantize_rows(x, group))


def test_halves_go_to_the_even_neighbour(operator: Operator, isa: str) -> None:
    x = np.concatenate([np.arange(-126.5, 127), [127.0]]).astype(np.float32)[None]
    q, scale = run(QUANTIZE_ROWS, x)
    assert scale == 1
    np.testing.assert_array_equal(q, np.rint(x).astype(np.int8))
    assert set(np.abs(q[0, :-1]) % 2) == {0}


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-42, 7.8e-31, 0.0, -0.0])
def test_extreme_values(operator: Operator, isa: str, value: float, group: int) -> None:
    """A NaN or an infinity anywhere in a group makes its scale NaN; what is next to nothing counts as zeros."""
    x = normal(1, 40, 37)
    x[np.arange(37), np.arange(37)] = value
    x[38], x[39] = value, 0
    found = run(QUANTIZE_ROWS, x, group_size=group)
    same(found, reference.quantize_rows(x, group))
    assert np.isnan(found[1]).any() == (not np.isfinite(value))
    assert not found[1][39].any()


@SETTINGS
@given(shape=SHAPES, seed=SEEDS, group=GROUPS, epsilon=st.sampled_from([1e-5, 1e-2]), with_sum=st.booleans())
def test_norm_is_that_of_the_separate_operators(
    operator: Operator, isa: str, shape: tuple[int, ...], seed: int, group: int, epsilon: float, with_sum: bool
) -> None:
    x, skip, gamma = normal(seed, *shape), normal(seed + 1, *shape, scale=3), normal(seed + 2, shape[-1])
    normalized, total = run(ADD_RMS_NORM, x, skip, gamma, epsilon=epsilon)
    expected = [*run(QUANTIZE_ROWS, normalized, group_size=group), total]
    outputs = 3 if with_sum else 2
    found = run(ADD_RMS_NORM_QUANTIZE, x, skip, gamma, outputs=outputs, epsilon=epsilon, group_size=group)
    same(found, expected[:outputs])
    close(found, reference.add_rms_norm_quantize(x, skip, gamma, epsilon, group))


@SETTINGS
@given(shape=SHAPES, seed=SEEDS, group=GROUPS, alpha=st.sampled_from([1.0, 1.5]))
def test_gate_is_that_of_the_separate_operators(
    operator: Operator, isa: str, shape: tuple[int, ...], seed: int, group: int, alpha: float
) -> None:
    gate, up = normal(seed, *shape, scale=3), normal(seed + 1, *shape)
    found = run(SWIGLU_QUANTIZE, gate, up, alpha=alpha, group_size=group)
    same(found, run(QUANTIZE_ROWS, *run(SWIGLU, gate, up, alpha=alpha), group_size=group))
    close(found, reference.swiglu_quantize(gate, up, alpha, group))


def close(found: list[NDArray], expected: tuple[NDArray, ...]) -> None:
    """To the rounding of the norm or the gate, which may tip a value next to a tie."""
    assert (np.abs(found[0].astype(int) - expected[0]) <= 1).all()
    np.testing.assert_allclose(found[1], expected[1], rtol=3e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (70, 701), (513, 96)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(operator: Operator, isa: str, rows: int, width: int) -> None:
    x, skip, gamma = normal(1, rows, width), normal(2, rows, width, scale=3), normal(3, width)
    for spec, inputs, fixed in (
        (QUANTIZE_ROWS, (x,), ()),
        (ADD_RMS_NORM_QUANTIZE, (x, skip), (gamma,)),
        (SWIGLU_QUANTIZE, (x, skip), ()),
    ):
        batches = [run(spec, *inputs, *fixed, threads=threads) for threads in (1, 2, 3)]
        for row in range(0, rows, 1 + rows // 20):
            alone = run(spec, *(one[row].copy() for one in inputs), *fixed)
            for batch in batches:
                assert [one[row].tobytes() for one in batch] == [one.tobytes() for one in alone]


def test_left_out_attributes_have_their_defaults(operator: Operator) -> None:
    x, skip, gamma = normal(1, 4, 33, scale=1e-3), normal(2, 4, 33, scale=1e-3), normal(3, 33)
    same(run(QUANTIZE_ROWS, x), reference.quantize_rows(x))
    for spec, inputs in ((ADD_RMS_NORM_QUANTIZE, (x, skip, gamma)), (SWIGLU_QUANTIZE, (x, skip))):
        same(run(spec, *inputs), run(spec, *inputs, **spec.attributes))


ONES = np.ones((3, 4), np.float32)
MISSHAPEN: dict[str, tuple[OperatorSpec, tuple[NDArray, ...], str]] = {
    "scalar": (QUANTIZE_ROWS, (ONES[0, 0],), r"QuantizeRows: x has the wrong rank: found \[\], expected \[..., k\]"),
    "skip": (ADD_RMS_NORM_QUANTIZE, (ONES, ONES[:1], ONES[0]), r"skip .* found \[1, 4\], expected \[3, 4\]"),
    "gamma": (ADD_RMS_NORM_QUANTIZE, (ONES, ONES, ONES[0, :3]), r"gamma .* found \[3\], expected \[4\]"),
    "up": (SWIGLU_QUANTIZE, (ONES, ONES[:, :1]), r"up has the wrong shape: found \[3, 1\], expected \[3, 4\]"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_shapes_that_do_not_fit_are_refused(operator: Operator, name: str) -> None:
    spec, inputs, message = MISSHAPEN[name]
    with pytest.raises(Exception, match=message):
        run(spec, *(np.array(one) for one in inputs))


@pytest.mark.parametrize(
    ("spec", "attributes", "message"),
    [
        (QUANTIZE_ROWS, {"group_size": 6}, "group_size must be 0 .* or a multiple of 4 up to 131072: found 6"),
        (QUANTIZE_ROWS, {"group_size": -4}, "found -4"),
        (SWIGLU_QUANTIZE, {"group_size": 2**20}, "found 1048576"),
        (SWIGLU_QUANTIZE, {"alpha": float("inf")}, "kiln::SwiGluQuantize: alpha must be finite: found inf"),
        (ADD_RMS_NORM_QUANTIZE, {"epsilon": -1.0}, "epsilon must be 0 or positive: found -1"),
    ],
)
def test_bad_attributes_are_refused_when_the_session_opens(
    operator: Operator, spec: OperatorSpec, attributes: dict[str, float], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        session(spec, len(spec.inputs), len(spec.outputs), **attributes)
