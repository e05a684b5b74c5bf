"""Products with quantised weights, through onnxruntime, against integers and float64."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plugins.errors import KilnError
from plugins.quant_matmul import packing, reference
from plugins.quant_matmul.schema import INT8_MATMUL, QUANTIZE_ROWS, WEIGHT_MATMUL
from plugins.spec import OperatorSpec

from .conftest import Operator
from .one_node import ISAS, each_isa, normal, run, session

isa = pytest.fixture(params=ISAS)(each_isa)
SETTINGS = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
EPSILON = 2.0**-24


@dataclass(frozen=True)
class Case:
    """A product, reproducible from its fields."""

    m: int
    k: int
    n: int
    bits: int = 8
    group: int = 0
    activation_group: int = 0
    bias: bool = False
    zeros: bool = False
    seed: int = 0

    @functools.cached_property
    def x(self) -> NDArray[np.float32]:
        return normal(self.seed, self.m, self.k)

    @functools.cached_property
    def weights(self) -> NDArray[np.int8]:
        offset = 2 ** (self.bits - 1)
        return np.random.default_rng(self.seed + 1).integers(-offset, offset, (self.k, self.n)).astype(np.int8)

    @functools.cached_property
    def weight_scale(self) -> NDArray[np.float32]:
        groups = max(1, -(-self.k // self.group)) if self.group else 1
        return np.random.default_rng(self.seed + 2).uniform(0.01, 0.02, (self.n, groups)).astype(np.float32)

    @functools.cached_property
    def biases(self) -> NDArray[np.float32] | None:
        return normal(self.seed + 3, self.n) if self.bias else None

    @functools.cached_property
    def weight_zero(self) -> NDArray[np.float32] | None:
        offset = 2 ** (self.bits - 1)
        shape = self.weight_scale.shape
        return (
            np.random.default_rng(self.seed + 4).uniform(-offset, offset, shape).astype(np.float32)
            if self.zeros
            else None
        )

    def packed(self) -> list[NDArray | None]:
        """The operands from `weight` on."""
        zero = None if self.weight_zero is None else packing.pack_scales(self.weight_zero)
        return [packing.pack(self.weights, self.bits), packing.pack_scales(self.weight_scale), self.biases, zero]

    def attributes(self, spec: OperatorSpec) -> dict[str, int]:
        attributes = {"n": self.n, "bits": self.bits, "group_size": self.group}
        return attributes | ({"activation_group_size": self.activation_group} if spec is INT8_MATMUL else {})

    def activations(self, spec: OperatorSpec) -> list[NDArray]:
        if spec is WEIGHT_MATMUL:
            return [self.x]
        return list(reference.quantize_rows(self.x, self.activation_group))

    def run(self, spec: OperatorSpec, activations: list[NDArray] | None = None, threads: int = 2) -> NDArray:
        operands = [*(activations or self.activations(spec)), *self.packed()]
        return run(spec, *operands, threads=threads, **self.attributes(spec))[0]

    def expected(self, spec: OperatorSpec) -> NDArray[np.float64]:
        given = (*self.activations(spec), self.weights, self.weight_scale, self.biases, self.group)
        if spec is WEIGHT_MATMUL:
            return reference.weight_matmul(*given, weight_zero=self.weight_zero)
        return reference.int8_matmul(*given, self.activation_group, weight_zero=self.weight_zero)

    def allowed(self, spec: OperatorSpec) -> NDArray[np.float64]:
        """A rounding a group and factor for integers, one a product for floats."""
        largest = np.abs(self.weights.astype(np.float32))
        if self.weight_zero is not None:
            largest += np.abs(np.repeat(self.weight_zero, self.group or max(1, self.k), axis=1).T[: self.k])
        scaled = largest * np.repeat(self.weight_scale, self.group or max(1, self.k), axis=1).T[: self.k]
        magnitude = np.abs(self.x).astype(np.float64) @ scaled + np.abs(0 if self.biases is None else self.biases)
        roundings = self.weight_scale.shape[1] + 4 + (self.k if spec is WEIGHT_MATMUL else 0)
        return magnitude * 1.01 * EPSILON * roundings + 1e-30


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few and many rows, panels that are not full, depths that are not whole steps, groups of either or both."""
    bits = draw(st.sampled_from([8, 4]))
    group = draw(st.sampled_from([0, 4, 12, 32, 64, 128]))
    activation_group = draw(st.sampled_from([0, group]) if group else st.sampled_from([0, 4, 20, 64]))
    return Case(
        m=draw(st.one_of(st.integers(0, 20), st.integers(21, 120))),
        k=draw(st.one_of(st.integers(0, 70), st.sampled_from([64, 128, 576, 700]))),
        n=draw(st.one_of(st.integers(0, 70), st.integers(71, 300), st.sampled_from([64, 192]))),
        bits=bits,
        group=group,
        activation_group=activation_group,
        bias=draw(st.booleans()),
        zeros=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def check(case: Case, spec: OperatorSpec) -> None:
    found = case.run(spec)
    assert found.shape == (case.m, case.n)
    assert (np.abs(found - case.expected(spec)) <= case.allowed(spec)).all(), case


@SETTINGS
@given(case=cases())
@example(Case(m=100, k=576, n=300, bits=8, bias=True))
@example(Case(m=100, k=576, n=300, bits=4, group=32, activation_group=32, zeros=True))
@example(Case(m=16, k=1536, n=64, bits=4, group=64))
def test_integer_product(operator: Operator, isa: str, case: Case) -> None:
    check(case, INT8_MATMUL)


@SETTINGS
@given(case=cases())
@example(Case(m=200, k=1100, n=300, bits=8, bias=True))
@example(Case(m=100, k=576, n=300, bits=4, group=36))
@example(Case(m=7, k=1100, n=40, bits=8, group=1040))
def test_float_product(operator: Operator, isa: str, case: Case) -> None:
    check(case, WEIGHT_MATMUL)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 16, 50])
def test_largest_values_do_not_saturate(operator: Operator, isa: str, bits: int, rows: int) -> None:
    """The deepest group there may be, of the largest values, of all signs."""
    k, n, largest = 131072, 20, 2 ** (bits - 1) - 1
    weights = np.full((k, n), largest, np.int8)
    weights[:, 1] = -largest
    weights[k // 2 :, 2] = -largest
    weights[::2, 3] = -largest
    q = np.full((rows, k), 127, np.int8)
    q[rows // 2 :] = -127
    scale, weight_scale = np.ones((rows, 1), np.float32), np.ones((n, 1), np.float32)
    packed = packing.pack(weights, bits), packing.pack_scales(weight_scale)
    found = run(INT8_MATMUL, q, scale, *packed, n=n, bits=bits)[0]
    whole = 127 * largest * k
    row = np.where(np.arange(rows) < rows // 2, 1, -1)[:, None]
    expected = row * np.array([whole, -whole, 0, 0, *[whole] * (n - 4)])
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("spec", [INT8_MATMUL, WEIGHT_MATMUL], ids=["int8", "float"])
@pytest.mark.parametrize(
    "case",
    [
        Case(m=70, k=576, n=200),
        Case(m=210, k=700, n=70, bits=4, group=64, bias=True),
        Case(m=19, k=129, n=24, group=12, bias=True, zeros=True),
        Case(m=210, k=576, n=70, bits=4, group=32, activation_group=32, zeros=True),
        Case(m=60, k=1100, n=40, bits=8),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    operator: Operator, isa: str, case: Case, spec: OperatorSpec
) -> None:
    activations = case.activations(spec)
    batches = [case.run(spec, threads=threads) for threads in (1, 2, 3)]
    assert len({batch.tobytes() for batch in batches}) == 1
    for first, last in ((0, 1), (1, 4), (3, 19), (5, case.m), (case.m - 1, case.m)):
        some = case.run(spec, [one[first:last] for one in activations])
        assert some.tobytes() == batches[0][first:last].tobytes(), (first, last)


@pytest.mark.parametrize("spec", [INT8_MATMUL, WEIGHT_MATMUL], ids=["int8", "float"])
@pytest.mark.parametrize("rows", [3, 60])
def test_a_row_that_is_not_finite_spoils_itself_only(
    operator: Operator, isa: str, spec: OperatorSpec, rows: int
) -> None:
    case = Case(m=rows, k=100, n=70, bits=4, group=20, activation_group=20)
    before = case.run(spec)
    case.x[1, 50] = np.nan
    after = case.run(spec)
    assert np.isnan(after[1]).all()
    others = np.arange(rows) != 1
    assert after[others].tobytes() == before[others].tobytes()


def test_leading_dimensions_stay(operator: Operator) -> None:
    case = Case(m=12, k=40, n=20, bias=True)
    for spec in (INT8_MATMUL, WEIGHT_MATMUL):
        flat = case.run(spec)
        shaped = case.run(spec, [one.reshape(2, 3, 2, -1) for one in case.activations(spec)])
        np.testing.assert_array_equal(shaped, flat.reshape(2, 3, 2, 20))
        row = case.run(spec, [one[0] for one in case.activations(spec)])
        np.testing.assert_array_equal(row, flat[0])


@pytest.mark.parametrize("bits", [8, 4])
@given(k=st.integers(0, 70), n=st.integers(0, 70), seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_packing_loses_nothing(bits: int, k: int, n: int, seed: int) -> None:
    case = Case(m=1, k=k, n=n, bits=bits, group=12, seed=seed)
    packed, scales, *_ = case.packed()
    np.testing.assert_array_equal(packing.unpack(packed, k, n, bits), case.weights)
    np.testing.assert_array_equal(packing.unpack_scales(scales, n), case.weight_scale)
    assert packed.nbytes == packing.packed_bytes(k, n, bits)


def test_what_cannot_be_packed_is_refused() -> None:
    ones = np.ones((4, 4), np.int8)
    for weights, bits, message in (
        (ones * 8, 4, "weights to pack are 8 to 8; 4 bits hold -8 to 7"),
        (ones * -9, 4, "weights to pack are -9 to -9; 4 bits hold -8 to 7"),
        (ones.astype(np.int32), 8, r"int32 \[4, 4\]; expected int8 \[k, n\]"),
        (ones, 5, "weights of 5 bits cannot be packed; expected 8 or 4"),
    ):
        with pytest.raises(KilnError, match=message):
            packing.pack(weights, bits)
    with pytest.raises(KilnError, match=r"shape \[64\]; expected \[128\] for 8 bits, k = 5, n = 4"):
        packing.unpack(packing.pack(ones, 8), 5, 4, 8)
    with pytest.raises(KilnError, match=r"shape \[4\]; expected \[n, groups\]"):
        packing.pack_scales(np.ones(4))


SMALL = Case(m=3, k=8, n=4, bias=True, zeros=True)
Q, SCALE = SMALL.activations(INT8_MATMUL)
WEIGHT, WEIGHT_SCALE, BIAS, ZERO = SMALL.packed()
MISSHAPEN: dict[str, tuple[OperatorSpec, list[NDArray], str]] = {
    "scale": (INT8_MATMUL, [Q, SCALE[:1], WEIGHT, WEIGHT_SCALE], r"Int8MatMul: scale .* \[1, 1\], expected \[3, 1\]"),
    "k": (INT8_MATMUL, [Q[:, :4], SCALE, WEIGHT, WEIGHT_SCALE], r"weight .* found \[128\], expected \[64\]"),
    "q": (INT8_MATMUL, [Q[0, 0], SCALE, WEIGHT, WEIGHT_SCALE], r"q has the wrong rank: found \[\], expected \[..., k"),
    "weight": (WEIGHT_MATMUL, [SMALL.x, WEIGHT[1:], WEIGHT_SCALE], r"WeightMatMul: weight .* \[127\], expected \[128"),
    "weight_scale": (WEIGHT_MATMUL, [SMALL.x, WEIGHT, WEIGHT_SCALE[0]], r"\[1, 16\], expected \[1, 1, 16\]"),
    "bias": (WEIGHT_MATMUL, [SMALL.x, WEIGHT, WEIGHT_SCALE, BIAS[:1]], r"bias .* found \[1\], expected \[4\]"),
    "weight_zero": (WEIGHT_MATMUL, [SMALL.x, WEIGHT, WEIGHT_SCALE, BIAS, ZERO[0]], r"\[1, 16\], expected \[1, 1, 16\]"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_shapes_that_do_not_fit_are_refused(operator: Operator, name: str) -> None:
    spec, inputs, message = MISSHAPEN[name]
    with pytest.raises(Exception, match=message):
        run(spec, *(np.array(one) for one in inputs), n=4)


def test_groups_too_deep_to_sum_are_refused(operator: Operator) -> None:
    case = Case(m=1, k=131076, n=1)
    with pytest.raises(Exception, match="k is 131076, more than 32 bits can sum: expected groups of up to 131072"):
        case.run(INT8_MATMUL)


@pytest.mark.parametrize(
    ("spec", "attributes", "message"),
    [
        (INT8_MATMUL, {}, "kiln::Int8MatMul: attribute n, the number of outputs, is missing or negative"),
        (WEIGHT_MATMUL, {"n": 4, "bits": 5}, "kiln::WeightMatMul: bits must be 8 or 4: found 5"),
        (INT8_MATMUL, {"n": 4, "group_size": 10}, "group_size must be 0 .* or a multiple of 4 up to 131072: found 10"),
        (
            INT8_MATMUL,
            {"n": 4, "group_size": 32, "activation_group_size": 64},
            "the same unless one is 0: found 32 and",
        ),
    ],
)
def test_bad_attributes_are_refused_when_the_session_opens(
    operator: Operator, spec: OperatorSpec, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        session(spec, len(spec.inputs), 1, **attributes)


def test_rows_that_the_library_quantised_itself(operator: Operator, isa: str) -> None:
    """From floats to floats: within what 8 bits a row can hold."""
    case = Case(m=40, k=576, n=64)
    q, scale = run(QUANTIZE_ROWS, case.x)
    found = case.run(INT8_MATMUL, [q, scale])
    exact = reference.weight_matmul(case.x, case.weights, case.weight_scale)
    assert np.linalg.norm(found - exact) < 0.015 * np.linalg.norm(exact)
