"""BindAddRmsNorm: residual sums and their RMS norms, run on Kiln's CPU operator."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from passes.fuse_cpu_norm import BindAddRmsNorm

SIZE = 40
FUSED = "kiln::AddRmsNorm"
NORM = "SimplifiedLayerNormalization"
PLAIN = f"{NORM}<axis = -1, epsilon = 0.01>(t, g)"
TOLERANCE = 1e-6


def build(
    body: str,
    given: str = "float[N,T,40] x, float[N,T,40] k",
    made: str = "float[N,T,40] y",
    opset: int = 18,
) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> m ({given}) => ({made}) {{ {body} }}'
    )
    rng = np.random.default_rng(5)
    shapes = {"g": (SIZE,), "g2": (3, SIZE), "scalar": (1,), "row": (SIZE,), "matrix": (SIZE, SIZE)}
    constants = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    constants |= {"zero": np.array([0]), "flat": np.array([SIZE])}
    declared = {value.name for value in model.graph.input}
    read = {name for node in model.graph.node for name in node.input} - declared
    read |= (
        {"g"} if any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute) else set()
    )
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items() if n in read)
    return model


def feeds(*shape: int, **others: NDArray) -> dict[str, NDArray]:
    rng = np.random.default_rng()
    return {n: (rng.standard_normal(shape or (2, 3, SIZE)) * 2 + 1).astype(np.float32) for n in ("x", "k")} | others


def epsilon_of(model: onnx.ModelProto) -> float:
    (node,) = (node for node in model.graph.node if node.op_type == "AddRmsNorm")
    return onnx.helper.get_attribute_value(node.attribute[0])


@pytest.mark.parametrize("order", ["x, k", "k, x", "x, x"])
def test_sum_and_norm_become_one(order, tools):
    model = build(f"t = Add({order}) y = {PLAIN}")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED]
    assert applied.outcome.rewrites == 1
    assert list(applied.model.graph.node[0].output) == ["y"]
    assert epsilon_of(applied.model) == pytest.approx(0.01)
    given = feeds() if order != "x, x" else {"x": feeds()["x"]}
    tools.same_outputs(model, applied.model, feeds() | given, TOLERANCE)


def test_default_epsilon_of_the_norm_is_passed_on(tools):
    model = build(f"t = Add(x, k) y = {NORM}(t, g)")
    applied = tools.apply(model, BindAddRmsNorm())
    assert epsilon_of(applied.model) == pytest.approx(1e-5)
    small = {name: value / 1000 for name, value in feeds().items()}
    tools.same_outputs(model, applied.model, small, TOLERANCE)


def test_the_sum_goes_on_to_its_other_readers_with_its_bits(tools):
    model = build(f"t = Add(x, k) a = Neg(t) y = {PLAIN}", made="float[N,T,40] a, float[N,T,40] y")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED, "Neg"]
    assert list(applied.model.graph.node[0].output) == ["y", "t"]
    given = feeds()
    before, after = tools.run(model, given), tools.run(applied.model, given)
    assert before[0].tobytes() == after[0].tobytes()
    tools.same_outputs(model, applied.model, given, TOLERANCE)


def test_the_sum_stays_a_graph_output(tools):
    model = build(f"t = Add(x, k) y = {PLAIN}", made="float[N,T,40] y, float[N,T,40] t")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED]
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_a_chain_of_residual_blocks(tools):
    """Pre-norm blocks: each sum feeds its norm and the next sum; the first norm has no sum before it."""
    body = (
        f"n0 = {NORM}(x, g) p0 = MatMul(n0, matrix) t1 = Add(x, p0) "
        f"n1 = {NORM}(t1, g) p1 = MatMul(n1, matrix) t2 = Add(t1, p1) y = {NORM}(t2, g)"
    )
    model = build(body, "float[N,T,40] x")
    for name in ("n0", "n1", "p0", "p1"):
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", "T", SIZE])
        )
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [NORM, "MatMul", FUSED, "MatMul", FUSED]
    tools.same_outputs(model, applied.model, {"x": feeds()["x"]}, TOLERANCE)


def test_two_norms_of_one_sum_fuse_once(tools):
    model = build(f"t = Add(x, k) y = {PLAIN} z = {NORM}(t, row)", made="float[N,T,40] y, float[N,T,40] z")
    applied = tools.apply(model, BindAddRmsNorm())
    assert sorted(applied.ops) == [NORM, FUSED]
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_any_rank(rank, tools):
    sizes = (*(2, 3, 5)[: rank - 1], SIZE)
    shape = f"float[{','.join(map(str, sizes))}]"
    model = build(f"t = Add(x, k) y = {NORM}<axis = {rank - 1}>(t, g)", f"{shape} x, {shape} k", f"{shape} y")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED]
    tools.same_outputs(model, applied.model, feeds(*sizes), TOLERANCE)


def test_gamma_from_outside(tools):
    model = build(f"t = Add(x, k) y = {PLAIN}", "float[N,T,40] x, float[N,T,40] k, float[40] g")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED]
    tools.same_outputs(model, applied.model, feeds(g=feeds(SIZE)["x"]), TOLERANCE)


def test_a_constant_of_the_same_shape_may_be_added(tools):
    shape = "float[40]"
    model = build(f"t = Add(x, row) y = {PLAIN}", f"{shape} x", f"{shape} y")
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == [FUSED]
    tools.same_outputs(model, applied.model, {"x": feeds(SIZE)["x"]}, TOLERANCE)


def test_inside_a_branch(tools):
    model = tools.in_branch(build(f"t = Add(x, k) y = {PLAIN} z = Neg(t)", made="float[N,T,40] y, float[N,T,40] z"))
    applied = tools.apply(model, BindAddRmsNorm())
    assert applied.ops == ["If", FUSED, "Neg", FUSED, "Neg"]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds(flag=np.array(flag)), TOLERANCE)


def test_sum_outside_of_the_norms_branch_stays(tools):
    norm = f"(float[N,T,40] y1) {{ y1 = {PLAIN} }}"
    other = "(float[N,T,40] y2) { y2 = Neg(t) }"
    body = f"t = Add(x, k) y = If<then_branch = a () => {norm}, else_branch = o () => {other}>(flag)"
    applied = tools.apply(build(body, "float[N,T,40] x, float[N,T,40] k, bool flag"), BindAddRmsNorm())
    assert applied.ops == ["Add", "If", NORM, "Neg"]


FIXED = {"made": "float[2,3,40] y"}
UNTOUCHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no sum": (f"t = Mul(x, k) y = {PLAIN}", {}, ""),
    "another norm": ("t = Add(x, k) y = LayerNormalization(t, g)", {}, ""),
    "bias": (f"t = Add(x, row) y = {PLAIN}", {"given": "float[N,T,40] x"}, "not known to be the same"),
    "smaller x": (f"t = Add(x, k) y = {PLAIN}", {"given": "float[1,3,40] x, float[2,3,40] k", **FIXED}, "[1, 3, 40]"),
    "other symbols": (f"t = Add(x, k) y = {PLAIN}", {"given": "float[N,T,40] x, float[N,S,40] k"}, "not known to be"),
    "unnamed sizes": (f"t = Add(x, k) y = {PLAIN}", {"given": "float[N,?,40] x, float[N,?,40] k"}, "not known to be"),
    "unknown rank": (f"t = Add(x, k) y = {PLAIN}", {"given": "float[] x, float[] k", "made": "float[] y"}, "rank"),
    "float16": (
        f"t = Add(x, k) y = {NORM}(t, h)",
        {"given": "float16[N,T,40] x, float16[N,T,40] k, float16[40] h", "made": "float16[N,T,40] y"},
        "is on float16, float16, float16; expected float32",
    ),
    "two axes": (
        f"t = Add(x, k) y = {NORM}<axis = 1>(t, g2)",
        {"given": "float[2,3,40] x, float[2,3,40] k", **FIXED},
        "expected the last axis",
    ),
    "further outputs": (
        f"t = Add(x, k) y, u = {NORM}(t, g)",
        {"made": "float[N,T,40] y, float[N,T,1] u"},
        "has 2 outputs",
    ),
    "gamma of one element": (f"t = Add(x, k) y = {NORM}(t, scalar)", {}, "'scalar' [1] is not a constant [40]"),
    "gamma that the sum yields": (
        f"t = Add(x, k) r = Gather<axis = 0>(t, zero) h = Reshape(r, flat) y = {NORM}(t, h)",
        {"given": "float[1,1,40] x, float[1,1,40] k", "made": "float[1,1,40] y"},
        "is not a constant [40]",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_leaves_alone_what_the_operator_cannot_do(case, tools):
    body, declared, note = UNTOUCHED[case]
    model = build(body, **declared)
    if case == "unknown rank":
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.ClearField("shape")
    applied = tools.apply(model, BindAddRmsNorm())
    assert not applied.outcome.changed
    assert applied.ops == [node.op_type for node in model.graph.node]
    assert [note in text for text in applied.outcome.notes] == [True] * bool(note)
