"""BindSwiglu: QuickGelu and a product, run on Kiln's CPU operator."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from passes.fuse_cpu_swiglu import BindSwiglu
from passes.fuse_swiglu import FuseSwiglu

FUSED, QUICK_GELU = "kiln::SwiGlu", "com.microsoft::QuickGelu"
SILU = "a = com.microsoft.QuickGelu<alpha: float = 1.0>(x)"
TOLERANCE = 1e-5  # ONNX Runtime's sigmoid is off by some 1e-6


def build(
    body: str, given: str = "float[T,33] x, float[T,33] u", made: str = "float[T,33] y", opset: int = 20
) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> m ({given}) => ({made}) {{ {body} }}'
    )


def feeds(*shape: int, **others: NDArray) -> dict[str, NDArray]:
    rng = np.random.default_rng()
    return {n: (rng.standard_normal(shape or (5, 33)) * 3).astype(np.float32) for n in ("x", "u")} | others


def alpha_of(model: onnx.ModelProto) -> float:
    return onnx.helper.get_attribute_value(model.graph.node[0].attribute[0])


@pytest.mark.parametrize("product", ["Mul(a, u)", "Mul(u, a)"])
@pytest.mark.parametrize(
    ("attribute", "alpha"), [("<alpha: float = 1.0>", 1), ("<alpha: float = 0.5>", 0.5), ("", 1.702)]
)
def test_gate_and_product_become_one(product, attribute, alpha, tools):
    model = build(f"a = com.microsoft.QuickGelu{attribute}(x) y = {product}")
    applied = tools.apply(model, BindSwiglu())
    assert applied.ops == [FUSED]
    assert list(applied.model.graph.node[0].input) == ["x", "u"]
    assert alpha_of(applied.model) == pytest.approx(alpha)
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


@pytest.mark.parametrize("body", ["s = Sigmoid(x) a = Mul(x, s) y = Mul(a, u)", "a = Swish(x) y = Mul(u, a)"])
def test_exported_spellings_by_way_of_quick_gelu(body, tools):
    model = build(body, opset=24 if "Swish" in body else 20)
    applied = tools.apply(tools.apply(model, FuseSwiglu()).model, BindSwiglu())
    assert applied.ops == [FUSED]
    if "Swish" not in body:  # which ONNX Runtime may lack
        tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_any_rank(rank, tools):
    sizes = (2, 3, 5, 7)[:rank]
    shape = f"float[{','.join(map(str, sizes))}]"
    model = build(f"{SILU} y = Mul(a, u)", f"{shape} x, {shape} u", f"{shape} y")
    if rank == 0:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.SetInParent()
    applied = tools.apply(model, BindSwiglu())
    assert applied.ops == [FUSED]
    rng = np.random.default_rng()
    given = {name: np.asarray(rng.standard_normal(sizes), np.float32) for name in ("x", "u")}
    tools.same_outputs(model, applied.model, given, TOLERANCE)


def test_gate_that_others_read_too(tools):
    """The projection may be read again, and multiplied by itself; only its activation must not."""
    model = build(f"{SILU} y = Mul(a, x) z = Neg(x)", "float[T,33] x", "float[T,33] y, float[T,33] z")
    applied = tools.apply(model, BindSwiglu())
    assert sorted(applied.ops) == ["Neg", FUSED]
    tools.same_outputs(model, applied.model, {"x": feeds()["x"]}, TOLERANCE)


def test_product_that_is_an_output_and_read_again(tools):
    model = build(f"{SILU} y = Mul(a, u) z = Neg(y)", made="float[T,33] y, float[T,33] z")
    applied = tools.apply(model, BindSwiglu())
    assert applied.ops == [FUSED, "Neg"]
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_inside_a_branch(tools):
    model = tools.in_branch(build(f"{SILU} y = Mul(a, u)"))
    applied = tools.apply(model, BindSwiglu())
    assert applied.ops == ["If", FUSED, FUSED]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds(flag=np.array(flag)), TOLERANCE)


def test_product_in_a_branch_of_an_activation_outside_stays(tools):
    branches = [f"(float[T,33] y{n}) {{ y{n} = {op} }}" for n, op in enumerate(("Mul(a, u)", "Neg(u)"))]
    body = f"{SILU} y = If<then_branch = b () => {branches[0]}, else_branch = c () => {branches[1]}>(flag)"
    applied = tools.apply(build(body, "float[T,33] x, float[T,33] u, bool flag"), BindSwiglu())
    assert applied.ops == [QUICK_GELU, "If", "Mul", "Neg"]


UNTOUCHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation alone": (f"{SILU} y = Neg(a)", {}, ""),
    "another activation": ("a = Sigmoid(x) y = Mul(a, u)", {}, ""),
    "sum": (f"{SILU} y = Add(a, u)", {}, ""),
    "activation read twice": (f"{SILU} y = Mul(a, u) z = Neg(a)", {"made": "float[T,33] y, float[T,33] z"}, ""),
    "activation is an output": (f"{SILU} y = Mul(a, u)", {"made": "float[T,33] y, float[T,33] a"}, ""),
    "square": (f"{SILU} y = Mul(a, a)", {"given": "float[T,33] x"}, ""),
    "broadcast": (f"{SILU} y = Mul(a, u)", {"given": "float[T,33] x, float[33] u"}, "not known to be the same"),
    "other symbols": (f"{SILU} y = Mul(a, u)", {"given": "float[T,33] x, float[S,33] u"}, "['T', 33] and ['S', 33]"),
    "unnamed sizes": (f"{SILU} y = Mul(a, u)", {"given": "float[?,33] x, float[?,33] u"}, "not known to be the same"),
    "float16": (
        f"{SILU} y = Mul(a, u)",
        {"given": "float16[T,33] x, float16[T,33] u", "made": "float16[T,33] y"},
        "is on float16 and float16; expected float32",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_leaves_alone_what_the_operator_cannot_do(case, tools):
    body, declared, note = UNTOUCHED[case]
    model = build(body, **declared)
    applied = tools.apply(model, BindSwiglu())
    assert not applied.outcome.changed
    expected = [f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.node]
    assert applied.ops == expected
    assert [note in text for text in applied.outcome.notes] == [True] * bool(note)
