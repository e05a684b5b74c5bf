"""Masks and tables that become constants, and rotations that become look-ups by position, in exporters' spellings."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.fold_constants import FoldConstants
from passes.hoist_tables import HoistTables

RNG = np.random.default_rng(0)
POSITIONS, DIM = 64, 8
INVERSE = (10000.0 ** -np.linspace(0, 1, DIM // 2, endpoint=False)).astype(np.float32)
CONSTANTS = {
    "inv": INVERSE,
    "row": INVERSE[None],
    "column": INVERSE[None, :, None],
    "zero": np.int64(0),
    "one": np.int64(1),
    "two": np.int64(2),
    "two32": np.int32(2),
    "scale": np.float32(1.25),
    "factor": np.float32(4),
    "first": np.array([0], np.int64),
    "second": np.array([1], np.int64),
    "last": np.array([-1], np.int64),
    "outer": np.array([0, 2], np.int64),
    "half": np.array([DIM // 2], np.int64),
    "minus": np.array([-1, -1, -1], np.int64),
    "flat": np.array([0, 0, -1], np.int64),
    "big": np.int64(2048),
    "square": np.array([1100, 1100], np.int64),
}


def model_of(signature: str, body: str, opset: int = 18) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> graph {signature} {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items())
    return model


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def positions(dtype: type, *shape: int) -> np.ndarray:
    return RNG.integers(0, POSITIONS, shape).astype(dtype)


def table_of(model: onnx.ModelProto, node: onnx.NodeProto) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == node.input[0]))


# Rule 2: everything up to `angles`, then cosine and sine as they are used

ROTATIONS = {
    "Kiln's own": (
        "int32[tokens]",
        "u = Unsqueeze (p, outer) c = Cast <to = 1> (u) m = Mul (c, inv) angles = Concat <axis = -1> (m, m)",
    ),
    "operands swapped": (
        "int64[batch, seq]",
        "u = Unsqueeze (p, last) c = Cast <to = 1> (u) m = Mul (inv, c) angles = Concat <axis = -1> (m, m)",
    ),
    "MatMul": (
        "int64[batch, seq]",
        """s = Shape (p) b = Gather (s, first) shape = Concat <axis = 0> (b, last, second)
        filled = ConstantOfShape <value = int64[1] {1}> (three) negative = Mul (filled, last)
        same = Equal (shape, negative) target = Where (same, filled, shape) e = Expand (column, target)
        u = Unsqueeze (p, second) c = Cast <to = 1> (u) m = MatMul (e, c)
        t = Transpose <perm = [0, 2, 1]> (m) angles = Concat <axis = -1> (t, t)""",
    ),
    "MatMul of a constant": (
        "int64[batch, seq]",
        """u = Unsqueeze (p, second) c = Cast <to = 1> (u) m = MatMul (column, c)
        t = Transpose <perm = [0, 2, 1]> (m) angles = Concat <axis = -1> (t, t)""",
    ),
    "Einsum": (
        "int64[seq]",
        'c = Cast <to = 1> (p) m = Einsum <equation = "i,j->ij"> (c, inv) angles = Concat <axis = -1> (m, m)',
    ),
    "linear scaling": (
        "int64[batch, seq]",
        """c = Cast <to = 1> (p) d = Div (c, factor) u = Unsqueeze (d, last) m = Mul (u, inv)
        angles = Concat <axis = -1> (m, m)""",
    ),
    "offset": (
        "int64[batch, seq]",
        """o = Add (two, p) u = Unsqueeze (o, last) c = Cast <to = 1> (u) m = Mul (c, inv)
        angles = Concat <axis = -1> (m, m)""",
    ),
    "interleaved": (
        "int32[tokens]",
        """u = Unsqueeze (p, last) c = Cast <to = 1> (u) m = Mul (c, inv) v = Unsqueeze (m, last)
        d = Concat <axis = -1> (v, v) angles = Reshape (d, rows)""",
    ),
    "half a table": ("int32[tokens]", "u = Unsqueeze (p, last) c = Cast <to = 1> (u) angles = Mul (c, inv)"),
    "two static axes": (
        "int64[1, 16]",
        "u = Unsqueeze (p, last) c = Cast <to = 1> (u) m = Mul (c, inv) angles = Concat <axis = -1> (m, m)",
    ),
}
ENDS = {
    "plain": "cos = Cos (angles) sin = Sin (angles)",
    "attention scaling": "a = Cos (angles) cos = Mul (a, scale) b = Sin (angles) sin = Mul (scale, b)",
    "cast down": "a = Cos (angles) b = Mul (a, scale) cos = Cast <to = 10> (b) sin = Sin (angles)",
    "negative sine": "cos = Cos (angles) b = Sin (angles) sin = Neg (b)",
    "doubled afterwards": "a = Cos (angles) cos = Concat <axis = -1> (a, a) sin = Sin (angles)",
}


def rotation(kind: str, body: str, end: str = ENDS["plain"], opset: int = 18) -> onnx.ModelProto:
    model = model_of(f"({kind} p) => (float y, float z)", f"{body} {end} y = Identity (cos) z = Identity (sin)", opset)
    extra = {"three": np.array([3], np.int64), "rows": np.array([-1, DIM], np.int64)}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in extra.items())
    for output in model.graph.output:
        output.ClearField("type")
        output.type.tensor_type.elem_type = 10 if "to = 10" in end and output.name == "y" else 1
    return model


def feed(kind: str) -> dict[str, np.ndarray]:
    element, dims = kind.rstrip("]").split("[")
    shape = [int(dim) if dim.strip().isdigit() else 5 + index for index, dim in enumerate(dims.split(","))]
    return {"p": positions(np.dtype(element).type, *shape)}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("kind", "body"), ROTATIONS.values(), ids=ROTATIONS)
def test_rotations_become_look_ups(tools, kind, body, inside):
    model, feeds = rotation(kind, body), feed(kind)
    if inside:
        model, feeds = tools.in_branch(model), {**feeds, "flag": np.array(True)}
    result = tools.apply(tools.apply(model, FoldConstants()).model, HoistTables(POSITIONS))
    assert set(result.ops) <= {"If", "Gather", "Unsqueeze", "Identity"}
    assert result.ops.count("Gather") == (4 if inside else 2)
    tools.same_outputs(model, result.model, feeds, 1e-6)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_follows_belongs_into_the_table(tools, end):
    kind, body = ROTATIONS["operands swapped"]
    model = rotation(kind, body, end)
    result = tools.apply(model, HoistTables(POSITIONS))
    assert sorted(result.ops) == ["Gather", "Gather", "Identity", "Identity"]
    tools.same_outputs(model, result.model, feed(kind), 1e-3 if "to = 10" in end else 1e-6)


def test_the_form_is_a_gather_of_a_table_by_positions(tools):
    result = tools.apply(rotation(*ROTATIONS["Kiln's own"]), HoistTables(POSITIONS))
    look_ups = [node for node in result.model.graph.node if node.op_type == "Gather"]
    angle = np.arange(POSITIONS, dtype=np.float32)[:, None] * np.tile(INVERSE, 2)
    assert len(look_ups) == 2
    for node in look_ups:
        table = table_of(result.model, node)
        assert node.input[1] == "p"
        assert node.attribute[0].i == 0
        assert (table.shape, table.dtype) == ((POSITIONS, DIM), np.float32)
        expected = (np.cos if node.output[0].startswith("cos") else np.sin)(angle.astype(np.float64))
        np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)
    unsqueezes = [node for node in result.model.graph.node if node.op_type == "Unsqueeze"]
    assert [node.input[0] for node in unsqueezes] == [node.output[0] for node in look_ups]


def test_an_offset_is_in_the_table(tools):
    result = tools.apply(rotation(*ROTATIONS["offset"]), HoistTables(POSITIONS))
    node = next(node for node in result.model.graph.node if node.op_type == "Gather")
    np.testing.assert_allclose(table_of(result.model, node)[0, :4], np.cos(2 * INVERSE), rtol=1e-6)


def test_old_opsets_have_axes_as_attributes(tools):
    body = """u = Unsqueeze <axes = [0, 2]> (p) c = Cast <to = 1> (u) m = Mul (c, inv)
        angles = Concat <axis = -1> (m, m)"""
    model = rotation("int32[tokens]", body, opset=11)
    result = tools.apply(model, HoistTables(POSITIONS))
    assert sorted(set(result.ops)) == ["Gather", "Identity", "Unsqueeze"]
    tools.same_outputs(model, result.model, feed("int32[tokens]"), 1e-6)


def test_layers_share_one_look_up(tools):
    body = """
        u = Unsqueeze (p, last) c = Cast <to = 1> (u) m = Mul (c, inv) a = Cos (m)
        v = Unsqueeze (p, last) d = Cast <to = 1> (v) n = Mul (inv, d) b = Cos (n) y = Add (a, b)
    """
    model = model_of("(int64[tokens] p) => (float[tokens, k] y)", body)
    result = tools.apply(model, HoistTables(POSITIONS))
    assert result.ops == ["Gather", "Add"]
    tools.same_outputs(model, result.model, {"p": positions(np.int64, 5)}, 1e-6)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("q = Range (zero, n, one)", ["Range"]),
        ("r = Range (zero, n, one) q = Add (r, past)", ["Range", "Add"]),
        ("s = CumSum (mask, zero) q = Sub (s, one)", ["CumSum", "Sub"]),
        ("q = Add (mask, past)", ["Add"]),
    ],
)
def test_positions_that_the_graph_computes(tools, source, kept):
    body = f"{source} u = Unsqueeze (q, last) c = Cast <to = 1> (u) m = Mul (c, inv) y = Cos (m)"
    model = model_of("(int64 n, int64 past, int64[k] mask) => (float[k, h] y)", body)
    result = tools.apply(model, HoistTables(POSITIONS))
    assert result.ops == [*kept, "Gather"]
    feeds = {"n": np.array(7), "past": np.array(3), "mask": np.ones(9, np.int64)}
    tools.same_outputs(model, result.model, feeds, 1e-6)


def test_a_position_beyond_the_table_fails_loudly(tools):
    kind, body = ROTATIONS["operands swapped"]
    result = tools.apply(rotation(kind, body), HoistTables(POSITIONS))
    with pytest.raises(Exception, match="out of data bounds"):
        tools.run(result.model, {"p": np.array([[POSITIONS]])})


LEFT = {
    "floating-point positions": ("float[n]", "u = Unsqueeze (p, last) m = Mul (u, inv) y = Cos (m)", None),
    "a scalar": ("int64", "c = Cast <to = 1> (p) m = Mul (c, inv) y = Cos (m)", None),
    "two integer tensors": (
        "int64[n]",
        """c = Cast <to = 1> (p) d = Cast <to = 1> (q) e = Add (c, d) u = Unsqueeze (e, last) m = Mul (u, inv)
        y = Cos (m)""",
        None,
    ),
    "a frequency from the largest position": (
        "int64[n]",
        """c = Cast <to = 1> (p) top = ReduceMax <keepdims = 0> (c) v = Div (inv, top) u = Unsqueeze (c, last)
        m = Mul (u, v) y = Cos (m)""",
        None,
    ),
    "rows that mix": (
        "int64[4]",
        """c = Cast <to = 1> (p) m = Mul (c, inv) t = Unsqueeze (m, first) e = Unsqueeze (c, last) a = Add (t, e)
        y = Cos (a)""",
        "depends on other elements",
    ),
    "the first row in all": (
        "int64[n]",
        """c = Cast <to = 1> (p) f = Slice (c, first, second) u = Unsqueeze (c, last) d = Sub (u, f)
        m = Mul (d, inv) y = Cos (m)""",
        "depends on other elements",
    ),
    "an axis in front": (
        "int64[n]",
        "c = Cast <to = 1> (p) u = Unsqueeze (c, first) v = Unsqueeze (inv, last) m = Mul (u, v) y = Cos (m)",
        "not a row for each position",
    ),
    "a batch from elsewhere": (
        "int64[n]",
        """s = Shape (x) t = Concat <axis = 0> (s, half) w = Expand (inv, t) u = Unsqueeze (p, last)
        c = Cast <to = 1> (u) m = Mul (c, w) y = Cos (m)""",
        "is not known from the shape of 'p' alone",
    ),
}


@pytest.mark.parametrize(("kind", "body", "note"), LEFT.values(), ids=LEFT)
def test_what_is_no_row_for_each_position_stays(tools, kind, body, note):
    model = model_of(f"({kind} p, int64[n] q, float[other] x) => (float y)", body)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = tools.apply(model, HoistTables(POSITIONS))
    assert "Cos" in result.ops
    assert "Gather" not in result.ops
    assert not result.outcome.changed
    assert [note in found for found in result.outcome.notes] == ([True] if note else [])


@pytest.mark.parametrize(
    ("hoist", "notes"),
    [(HoistTables(), 0), (HoistTables(POSITIONS, size_limit=POSITIONS * DIM * 4 - 1), 2)],
    ids=["no bound", "too large"],
)
def test_without_a_bound_or_room_nothing_changes(tools, hoist, notes):
    model = rotation(*ROTATIONS["Kiln's own"])
    result = tools.apply(model, hoist)
    assert result.ops == [node.op_type for node in model.graph.node]
    assert len(result.outcome.notes) == notes


def test_other_readers_keep_their_values(tools):
    kind, body = ROTATIONS["operands swapped"]
    end = "a = Cos (angles) cos = Mul (a, scale) b = Sin (angles) sin = Add (a, b)"
    model = rotation(kind, body, end)
    result = tools.apply(model, HoistTables(POSITIONS))
    assert sorted(result.ops) == ["Add", "Gather", "Gather", "Identity", "Identity", "Mul"]
    tools.same_outputs(model, result.model, feed(kind), 1e-6)


# Rule 1

CAUSAL = """
    r = Range (zero, big, one) i = Unsqueeze (r, first) j = Unsqueeze (r, second) later = Greater (i, j)
    mask = Where (later, low, high) y = Add (x, mask)
"""
TABLES = {
    "causal mask": (CAUSAL, ["Add"]),
    "triangle": (
        "o = ConstantOfShape <value = float[1] {1.0}> (square) t = Trilu <upper = 0> (o) y = Mul (x, t)",
        ["Mul"],
    ),
    "ends before Expand": (
        """r = Range (zero, big, one) c = Cast <to = 1> (r) u = Unsqueeze (c, last) m = Mul (u, row) t = Cos (m)
        f = ReduceSum <keepdims = 1> (t, second) e = Expand (f, shape) y = Add (x, e)""",
        ["Expand", "Add"],
    ),
    "no mask": ("e = Expand (high, square) d = Mul (e, scale) y = Add (x, d)", ["Expand", "Mul", "Add"]),
    "zeros": ("o = ConstantOfShape (square) y = Add (x, o)", ["ConstantOfShape", "Add"]),
    "a weight": ("g = Greater (weight, high) c = Cast <to = 1> (g) y = Add (x, c)", ["Greater", "Cast", "Add"]),
    "random": (
        "r = RandomNormal <shape = [4, 4]> () g = Greater (r, high) c = Cast <to = 1> (g) y = Add (x, c)",
        ["RandomNormal", "Greater", "Cast", "Add"],
    ),
}


def table_model(body: str) -> onnx.ModelProto:
    model = model_of("(float[a, b] x) => (float[c, d] y)", body)
    extra = {
        "low": np.float32(-1e9),
        "high": np.float32(0),
        "shape": np.array([2048, 600], np.int64),
        "weight": np.ones((512, 513), np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in extra.items())
    return model


@pytest.mark.parametrize(("body", "ops"), TABLES.values(), ids=TABLES)
def test_masks_and_tables_become_constants(tools, body, ops):
    model = table_model(body)
    result = tools.apply(model, HoistTables())
    assert result.ops == ops
    if "Random" not in body:
        tools.same_outputs(model, result.model, {"x": floats(1, 1)}, 1e-6)


def test_a_mask_after_folding_and_in_a_branch(tools):
    model = tools.in_branch(table_model(CAUSAL))
    folded = tools.apply(model, FoldConstants())
    assert "Greater" in folded.ops
    result = tools.apply(folded.model, HoistTables())
    assert result.ops == ["If", "Add", "Add"]
    tools.same_outputs(model, result.model, {"x": floats(1, 1), "flag": np.array(True)})


def test_a_mask_above_the_limit_stays(tools):
    """The comparison fits, what is made of it does not."""
    result = tools.apply(table_model(CAUSAL), HoistTables(size_limit=2**23))
    assert result.ops == ["Where", "Add"]


def test_a_mask_that_is_an_output_keeps_its_name(tools):
    body = "o = ConstantOfShape <value = float[1] {1.0}> (square) y = Trilu <upper = 0> (o) z = Add (x, y)"
    model = model_of("(float[a, b] x) => (float[c, d] y, float[e, f] z)", body)
    result = tools.apply(model, HoistTables())
    assert sorted(result.ops) == ["Add", "Identity"]
    tools.same_outputs(model, result.model, {"x": floats(1, 1)})
