"""The token-wise operators, through onnxruntime, against the float64 reference."""

import functools
import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.build import cpu_library
from plugins.elementwise.reference import add_rms_norm, swiglu
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.spec import OperatorSpec

from .conftest import Operator, ort_value

RELATIVE = 6e-7  # per element; the exponential takes half of it, roundings of products the rest
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHAPES = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.tuples(st.integers(1, 70), st.integers(1, 1600)),
    st.sampled_from([(1,), (1, 1, 1, 1), (0,), (3, 0), (0, 576), (2, 0, 5), (16, 576), (60, 1536), (1, 40000)]),
).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-20, 1e-3, 1.0, 1.0, 30.0, 1e18])


@functools.cache
def session(
    operator: OperatorSpec, outputs: int, threads: int, shapes: tuple[tuple[int, ...], ...] = (), **attributes: Any
) -> ort.InferenceSession:
    """One node. With the operands' `shapes`, it reads and makes copies, known to be nobody else's: it may write over
    what it reads.
    """
    names = [spec.name for spec in operator.inputs]
    results = [spec.name for spec in operator.outputs][:outputs]
    nodes: list[onnx.NodeProto] = []

    def copy(source: str, target: str) -> None:
        nodes.append(helper.make_node("Neg", [source], [f"{source}_negative"]))
        nodes.append(helper.make_node("Neg", [f"{source}_negative"], [target]))

    inner = "_inner" if shapes else ""
    for name in names if shapes else ():
        copy(name, name + inner)
    operands, made = ([name + inner for name in side] for side in (names, results))
    nodes.append(helper.make_node(operator.op_type, operands, made, domain=operator.domain, **attributes))
    for name in results if shapes else ():
        copy(name + inner, name)
    graph = helper.make_graph(
        nodes,
        "one_node",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in itertools.zip_longest(names, shapes)
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        value_info=[helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[0]) for name in made if shapes],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(operator.domain, operator.since_version)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(str(cpu_library()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    operator: OperatorSpec,
    *inputs: NDArray,
    outputs: int | None = None,
    threads: int = 2,
    in_place: bool = False,
    **attributes: Any,
) -> list[NDArray]:
    """Outputs in buffers that were full of NaN."""
    count = len(operator.outputs) if outputs is None else outputs
    shapes = tuple(array.shape for array in inputs) if in_place else ()
    opened = session(operator, count, threads, shapes, **attributes)
    feeds = dict(zip((spec.name for spec in operator.inputs), inputs, strict=True))
    if inputs[0].size == 0:  # no memory to bind
        return opened.run(None, feeds)
    results = [np.full(inputs[0].shape, np.nan, np.float32) for _ in range(count)]
    binding = opened.io_binding()
    values = {name: ort_value(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for spec, array in zip(operator.outputs, results, strict=False):
        binding.bind_ortvalue_output(spec.name, ort_value(array))
    opened.run_with_iobinding(binding)
    return results


def normal(seed: int, *shape: int, scale: float = 1.0) -> NDArray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, np.float32)


def check(found: NDArray, expected: NDArray, absolute: NDArray | float = 1e-44, relative: float = RELATIVE) -> None:
    """Element by element; what float32 cannot hold is infinite, as is NaN where the reference is."""
    with np.errstate(over="ignore"):
        rounded = expected.astype(np.float32)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(found[special], rounded[special])
    error = np.abs(np.where(special, 0, found) - np.where(special, 0, expected))
    limit = np.where(special, 0, relative * np.abs(expected) + absolute)
    assert (error <= limit).all(), f"relative error {np.nanmax(error / np.maximum(limit, 1e-300)) * relative:.2e}"


def smallest(gate: NDArray, up: NDArray) -> NDArray:
    """What a sigmoid that counts as 0 may hide, and a rounding among the subnormals."""
    return np.abs(gate.astype(np.float64) * up) * 2.0**-126 + np.abs(up) * 2.0**-148 + 1e-44


@SETTINGS
@given(shape=SHAPES, seed=SEEDS, scale=SCALES, epsilon=st.sampled_from([1e-5, 1e-6, 1e-2]))
@example(shape=(513, 576), seed=0, scale=1.0, epsilon=1e-5)
def test_residual_sum_and_norm(
    operator: Operator, isa: str, shape: tuple[int, ...], seed: int, scale: float, epsilon: float
) -> None:
    x, skip = normal(seed, *shape, scale=scale), normal(seed + 1, *shape, scale=scale)
    gamma = normal(seed + 2, shape[-1])
    normalized, total = run(ADD_RMS_NORM, x, skip, gamma, epsilon=epsilon)
    expected, expected_total = add_rms_norm(x, skip, gamma, epsilon)
    assert total.tobytes() == expected_total.tobytes(), "the sum is that of an Add, to the bit"
    check(normalized, expected)


@SETTINGS
@given(shape=st.one_of(SHAPES, st.just(())), seed=SEEDS, scale=SCALES, alpha=st.sampled_from([1.0, 1.0, 1.702, -0.5]))
@example(shape=(513, 1536), seed=0, scale=1.0, alpha=1.0)
def test_gate(operator: Operator, isa: str, shape: tuple[int, ...], seed: int, scale: float, alpha: float) -> None:
    gate, up = normal(seed, *shape, scale=scale), normal(seed + 1, *shape)
    alpha = float(np.float32(alpha))
    (output,) = run(SWIGLU, gate, up, alpha=alpha)
    # The product alpha * gate is rounded, which the exponential amplifies by its argument.
    exact = alpha == 1 or scale < 1
    check(output, swiglu(gate, up, alpha), smallest(gate, up), RELATIVE if exact else 1e-5)


def test_exponential_over_its_whole_range(operator: Operator, isa: str) -> None:
    gate = np.linspace(-90, 90, 400_001, dtype=np.float32)
    up = np.ones_like(gate)
    check(run(SWIGLU, gate, up)[0], swiglu(gate, up), smallest(gate, up))


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (70, 701), (513, 96), (3, 20011)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(operator: Operator, isa: str, rows: int, width: int) -> None:
    x, skip, gamma = normal(1, rows, width), normal(2, rows, width, scale=3), normal(3, width)
    batches = [run(ADD_RMS_NORM, x, skip, gamma, threads=threads) for threads in (1, 2, 3)]
    gates = [run(SWIGLU, x, skip, threads=threads) for threads in (1, 2, 3)]
    for index in range(0, rows, 1 + rows // 40):
        alone = run(ADD_RMS_NORM, x[index].copy(), skip[index].copy(), gamma)
        gate = run(SWIGLU, x[index].copy(), skip[index].copy())
        for batch in batches:
            assert [row[index].tobytes() for row in batch] == [row.tobytes() for row in alone]
        assert {found[0][index].tobytes() for found in gates} == {gate[0].tobytes()}


@pytest.mark.parametrize("shape", [(5, 576), (80, 577)])
def test_writing_over_an_operand_changes_nothing(operator: Operator, isa: str, shape: tuple[int, int]) -> None:
    x, skip, gamma = normal(1, *shape), normal(2, *shape), normal(3, shape[-1])
    for inputs, spec, counts in (((x, skip, gamma), ADD_RMS_NORM, (1, 2)), ((x, skip), SWIGLU, (1,))):
        expected = run(spec, *inputs)
        for count in counts:
            found = run(spec, *inputs, outputs=count, in_place=True)
            assert [array.tobytes() for array in found] == [array.tobytes() for array in expected[:count]]


def test_sum_may_be_left_out(operator: Operator, isa: str) -> None:
    x, skip, gamma = normal(1, 40, 600), normal(2, 40, 600), normal(3, 600)
    (alone,) = run(ADD_RMS_NORM, x, skip, gamma, outputs=1)
    assert alone.tobytes() == run(ADD_RMS_NORM, x, skip, gamma)[0].tobytes()


def test_left_out_attributes_have_their_defaults(operator: Operator) -> None:
    x, skip, gamma = normal(1, 4, 33, scale=1e-3), normal(2, 4, 33, scale=1e-3), normal(3, 33)
    check(run(ADD_RMS_NORM, x, skip, gamma)[0], add_rms_norm(x, skip, gamma, ADD_RMS_NORM.attributes["epsilon"])[0])
    check(run(SWIGLU, x, skip)[0], swiglu(x, skip, SWIGLU.attributes["alpha"]))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, 1e-30, 1e30, 1.7e38, 3e38, np.inf, -np.inf, np.nan])
def test_norm_of_extreme_values(operator: Operator, isa: str, value: float) -> None:
    """Squares neither overflow nor vanish; an infinite element makes its row 0 and itself NaN, as the formula does."""
    x, gamma = normal(1, 3, 37), normal(2, 37)
    x[0, 5], x[1] = value, value
    skip = np.zeros_like(x)
    skip[1] = value  # 3e38 + 3e38 overflows
    normalized, total = run(ADD_RMS_NORM, x, skip, gamma)
    expected, expected_total = add_rms_norm(x, skip, gamma)
    np.testing.assert_array_equal(total, expected_total)
    check(normalized, expected, relative=2e-6)  # 1 / 3e38 has few bits left


def test_gate_of_extreme_values(operator: Operator, isa: str) -> None:
    large, tiny = np.float32(3e38), np.float32(1e-42)
    gates = np.array([0, -0.0, tiny, -tiny, 1e30, -1e30, large, -large, 80, -80, np.inf, -np.inf, np.nan], np.float32)
    ups = np.array([0, -0.0, 1, tiny, 1e30, -large, np.inf, -np.inf, np.nan], np.float32)
    gate, up = (array.reshape(-1).copy() for array in np.meshgrid(gates, ups))
    with np.errstate(invalid="ignore"):
        allowed = np.nan_to_num(smallest(gate, up))
    check(run(SWIGLU, gate, up)[0], swiglu(gate, up), allowed)


ONES = np.ones((3, 4), np.float32)
MISSHAPEN: dict[str, tuple[OperatorSpec, tuple[NDArray, ...], str]] = {
    "skip": (ADD_RMS_NORM, (ONES, ONES[:1], ONES[0]), r"skip has the wrong shape: found \[1, 4\], expected \[3, 4\]"),
    "rank": (ADD_RMS_NORM, (ONES, ONES[None], ONES[0]), r"skip .* found \[1, 3, 4\], expected \[3, 4\]"),
    "gamma": (ADD_RMS_NORM, (ONES, ONES, ONES[0, :3]), r"gamma has the wrong shape: found \[3\], expected \[4\]"),
    "gamma's rank": (ADD_RMS_NORM, (ONES, ONES, ONES), r"gamma has the wrong shape: found \[3, 4\], expected \[4\]"),
    "scalar": (ADD_RMS_NORM, (ONES[0, 0], ONES[0, 0], ONES[0]), r"x has the wrong rank: found \[\], expected \[..., "),
    "up": (SWIGLU, (ONES, ONES[:, :1]), r"kiln::SwiGlu: up has the wrong shape: found \[3, 1\], expected \[3, 4\]"),
    "up's rank": (SWIGLU, (ONES, ONES.reshape(-1)), r"up has the wrong shape: found \[12\], expected \[3, 4\]"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_shapes_that_do_not_fit_are_refused(operator: Operator, name: str) -> None:
    spec, inputs, message = MISSHAPEN[name]
    feeds = {operand.name: np.array(array) for operand, array in zip(spec.inputs, inputs, strict=True)}
    with pytest.raises(Exception, match=message):
        session(spec, len(spec.outputs), 1).run(None, feeds)


@pytest.mark.parametrize(
    ("spec", "attributes", "message"),
    [
        (ADD_RMS_NORM, {"epsilon": -1e-5}, "kiln::AddRmsNorm: epsilon must be 0 or positive: found -1e-05"),
        (ADD_RMS_NORM, {"epsilon": float("inf")}, "epsilon must be 0 or positive: found inf"),
        (ADD_RMS_NORM, {"epsilon": 1}, "attribute epsilon must be a float: found the integer 1"),
        (SWIGLU, {"alpha": float("-inf")}, "kiln::SwiGlu: alpha must be finite: found -inf"),
        (SWIGLU, {"alpha": 2}, "attribute alpha must be a float: found the integer 2"),
    ],
)
def test_bad_attributes_are_refused_when_the_session_opens(
    operator: Operator, spec: OperatorSpec, attributes: dict[str, float], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        session(spec, len(spec.outputs), 1, **attributes)
