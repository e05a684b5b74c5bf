"""FuseRope for graphs without paged attention: every spelling, layouts, near misses, subgraphs, numbers."""

import numpy as np
import onnx
import pytest

from passes.fuse_rope import FuseRope
from tests.passes.rope_models import (
    HALVES,
    LOOK_UP,
    PAIRS,
    POSITIONS,
    ROTATED,
    SPELLINGS,
    feeds,
    model_of,
    spelled,
    tables,
)

CONTRIB, STANDARD = "com.microsoft::RotaryEmbedding", "RotaryEmbedding"
TOLERANCE = 1e-6
HALF = SPELLINGS["halves by Slice"]


def fused_node(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.op_type == "RotaryEmbedding")
    return node


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}


@pytest.mark.parametrize(("target", "opset", "op"), [("rotary_embedding", 21, CONTRIB), ("standard", 23, STANDARD)])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_becomes_one_node(tools, name, target, opset, op):
    model = spelled(name, opset=opset)
    applied = tools.apply(model, FuseRope(target))
    assert applied.ops == [op]
    assert applied.outcome.rewrites == 1
    found = attributes(fused_node(applied.model))
    assert found["interleaved"] == SPELLINGS[name].interleaved
    assert found.get("rotary_embedding_dim", 8) == SPELLINGS[name].rotary
    caches = [tensor for tensor in applied.model.graph.initializer if "cache" in tensor.name]
    assert [list(cache.dims) for cache in caches] == [[POSITIONS, SPELLINGS[name].rotary // 2]] * 2
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


LAYOUTS = {
    "[batch, heads, seq, dim]": ("float[B,4,S,8]", "int64[B,S]", LOOK_UP, (2, 4, 5, 8), (2, 5)),
    "[1, heads, seq, dim]": ("float[1,4,S,8]", "int64[S]", LOOK_UP.replace("c1", "c0"), (1, 4, 5, 8), (5,)),
    "[batch, seq, heads, dim]": ("float[B,S,4,8]", "int64[B,S]", LOOK_UP.replace("c1", "c2"), (2, 5, 4, 8), (2, 5)),
    "[seq, heads, dim]": ("float[S,4,8]", "int64[S]", LOOK_UP, (5, 4, 8), (5,)),
    "one row of positions for a batch": ("float[B,4,S,8]", "int64[1,S]", LOOK_UP, (3, 4, 5, 8), (1, 5)),
    "positions as int32": ("float[B,4,S,8]", "int32[B,S]", LOOK_UP, (2, 4, 5, 8), (2, 5)),
    "rows widened and cast before": (
        "float[1,4,S,8]",
        "int32[S]",
        "row1 = Unsqueeze(ids, c0)\nrow = Cast<to=7>(row1)\n" + LOOK_UP.replace("ids)", "row)"),
        (1, 4, 5, 8),
        (5,),
    ),
}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(("target", "opset"), [("rotary_embedding", 21), ("standard", 23)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tools, layout, target, opset, part):
    x, ids, look_up, shape, ids_shape = LAYOUTS[layout]
    spelling = SPELLINGS["a part by Slice"] if part else HALF
    model = model_of(look_up + spelling.body, tables(spelling), x, ids, opset=opset)
    applied = tools.apply(model, FuseRope(target))
    assert {"Mul", "Add", "Neg", "Slice"}.isdisjoint(applied.ops)
    assert sum(op.endswith("RotaryEmbedding") for op in applied.ops) == applied.outcome.rewrites == 1
    positions = np.random.default_rng().integers(0, POSITIONS, ids_shape, np.int32 if "32" in ids else np.int64)
    tools.same_outputs(model, applied.model, feeds(shape, positions), TOLERANCE)


def llama3(frequencies: np.ndarray) -> np.ndarray:
    """Low frequencies divided by 8, high ones kept, a linear blend in between."""
    blend = np.clip((16 * frequencies - 1) / 3, 0, 1)
    return (1 - blend) * frequencies / 8 + blend * frequencies


PLAIN = 10000.0 ** (-np.arange(4) / 4)
SCALED = {
    "linear": (PLAIN / 4, 1.0),
    "NTK": ((10000.0 * 4 ** (8 / 6)) ** (-np.arange(4) / 4), 1.0),
    "YaRN with its attention factor": (PLAIN / (1 + np.arange(4)), 0.1 * np.log(4) + 1),
    "Llama 3": (llama3(PLAIN), 1.0),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_scaling_is_carried_by_the_tables(tools, scaling):
    frequencies, factor = SCALED[scaling]
    model = model_of(LOOK_UP + HALF.body, tables(HALF, frequencies, factor))
    applied = tools.apply(model, FuseRope("rotary_embedding"))
    assert applied.ops == [CONTRIB]
    cos, sin = (onnx.numpy_helper.to_array(t) for t in applied.model.graph.initializer if "cache" in t.name)
    np.testing.assert_allclose(cos, factor * np.cos(np.outer(np.arange(POSITIONS), frequencies)), atol=1e-6)
    np.testing.assert_allclose(sin, factor * np.sin(np.outer(np.arange(POSITIONS), frequencies)), atol=1e-6)
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_half_precision_rounds_the_tables_once(tools):
    look_up = LOOK_UP.replace("cos =", "cos1 =").replace("sin =", "sin1 =")
    body = look_up + "cos = Cast<to=10>(cos1)\nsin = Cast<to=10>(sin1)" + HALF.body
    model = model_of(body, tables(HALF), "float16[B,4,S,8]")
    applied = tools.apply(model, FuseRope("rotary_embedding"))
    assert applied.ops == [CONTRIB]
    given = feeds()
    tools.same_outputs(model, applied.model, given | {"x": given["x"].astype(np.float16)}, 2e-3)


def test_tables_are_shared_where_they_are_equal(tools):
    body = (
        LOOK_UP
        + HALF.body
        + "".join(
            f"\n{line.replace('x,', 'y,').replace('x1', 'u1').replace('x2', 'u2')}"
            for line in HALF.body.replace("y =", "z =")
            .replace("turned", "turned2")
            .replace("negative", "n2")
            .splitlines()
            if line.strip()
        )
        .replace("cos_part", "cp2")
        .replace("sin_part", "sp2")
        .replace("z =", "z =")
    )
    model = model_of(body, tables(HALF))
    model.graph.output[0].name = "z"
    applied = tools.apply(model, FuseRope("rotary_embedding"))
    assert applied.ops == [CONTRIB, CONTRIB]
    assert sum("cache" in tensor.name for tensor in applied.model.graph.initializer) == 2
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


@pytest.mark.parametrize("target", ["rotary_embedding", "paged_attention"])
def test_subgraphs(tools, target):
    model = tools.in_branch(spelled("halves by Slice"))
    applied = tools.apply(model, FuseRope(target))
    assert applied.ops.count(CONTRIB) == (2 if target == "rotary_embedding" else 0)
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds() | {"flag": np.array(flag)}, TOLERANCE)


NEAR_MISSES = {
    "the second half is not negated": HALVES.replace("Neg(x2)", "Identity(x2)") + ROTATED,
    "both halves are negated": HALVES.replace("x1)", "minus_x1)").replace("turned", "minus_x1 = Neg(x1)\nturned", 1)
    + ROTATED,
    "halves in order": HALVES.replace("(negative, x1)", "(x1, negative)") + ROTATED,
    "thirds": HALVES.replace("c4", "c3") + ROTATED,
    "another product": HALVES
    + ROTATED.replace("Mul(turned, sin)", "Mul(turned, cos)").replace("Mul(x, cos)", "Mul(x, x)"),
    "cosines only": "y = Mul(x, cos)",
    "a third part": HALVES
    + ROTATED.replace("Add(cos_part,", "Add(more,").replace("y =", "more = Add(cos_part, x)\ny ="),
    "another scale": HALVES.replace("Neg(x2)", "Mul(x2, scale)") + ROTATED + "scale = Constant<value_float=-2.0>()",
    "another axis": HALVES.replace("last)", "c1)")
    .replace("last, c1)", "c1, c1)")
    .replace("c4", "c2")
    .replace("-1", "1")
    + ROTATED,
    "another vector turned": HALVES.replace("(x,", "(other,").replace("x1 =", "other = Relu(x)\nx1 =") + ROTATED,
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_other_arithmetic_stays(tools, what):
    lines = NEAR_MISSES[what].strip().splitlines()
    lines.sort(key=lambda line: "Constant" not in line)  # constants first
    model = model_of(LOOK_UP + "\n".join(lines), tables(HALF))
    applied = tools.apply(model, FuseRope("rotary_embedding"))
    assert not applied.outcome.changed
    assert CONTRIB not in applied.ops
    tools.same_outputs(model, applied.model, feeds())


@pytest.mark.parametrize("table", ["cos_table", "sin_table"])
def test_unequal_halves_are_refused(tools, table):
    weights = tables(HALF)
    weights[table][7, 6] += 0.5
    applied = tools.apply(model_of(LOOK_UP + HALF.body, weights), FuseRope("rotary_embedding"))
    assert not applied.outcome.changed
    assert f"{table[:3]} table's halves differ by up to 0.5; expected equal ones" in applied.outcome.notes[0]


def test_halves_laid_out_as_pairs_are_refused(tools):
    applied = tools.apply(model_of(LOOK_UP + PAIRS + ROTATED, tables(HALF)), FuseRope("rotary_embedding"))
    assert not applied.outcome.changed
    assert "halves differ" in applied.outcome.notes[0]


@pytest.mark.parametrize(
    ("x", "ids", "look_up"),
    [
        ("float[B,4,S,8]", "int64[B,T]", LOOK_UP),  # T may be 1 and be broadcast
        ("float[B,4,S,D]", "int64[B,S]", LOOK_UP),
        (
            "float[B,H,S,8]",
            "int64[S,B]",
            LOOK_UP.replace("cos_rows, c1", "cos_rows, c0").replace("sin_rows, c1", "sin_rows, c0"),
        ),
    ],
)
def test_unknown_sizes_are_left(tools, x, ids, look_up):
    applied = tools.apply(
        model_of(look_up + HALF.body, tables(HALF), x, ids, y="float[]"), FuseRope("rotary_embedding")
    )
    assert not applied.outcome.changed


def test_a_layout_that_the_operator_does_not_take_is_noted(tools):
    look_up = LOOK_UP.replace("c1)", "axes)")
    body = "axes = Constant<value_ints=[2, 3]>()" + look_up + HALF.body
    applied = tools.apply(model_of(body, tables(HALF), "float[B,S,2,4,8]"), FuseRope("rotary_embedding"))
    assert not applied.outcome.changed
    assert "rotated by positions ['B', 'S']" in applied.outcome.notes[0]


def test_an_inner_result_that_is_an_output_stays(tools):
    model = spelled("a part by Slice")
    model.graph.output.append(onnx.helper.make_tensor_value_info("rotated", 1, ["B", 4, "S", 4]))
    applied = tools.apply(model, FuseRope("rotary_embedding"))
    assert applied.ops.count(CONTRIB) == applied.outcome.rewrites == 2
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_standard_needs_opset_23(tools):
    applied = tools.apply(spelled("halves by Slice"), FuseRope("standard"))
    assert not applied.outcome.changed
    assert applied.outcome.notes == ["RotaryEmbedding is standard from opset 23; the graph has 21"]
