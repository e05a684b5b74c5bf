"""Rows are chosen in front of token-wise work, in every form of choice."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.select_rows import SelectRows

WIDTH, INNER, TOKENS = 8, 12, 5
TOLERANCE = 1e-6
RNG = np.random.default_rng(0)
WEIGHTS = {
    "up": RNG.normal(size=(WIDTH, INNER)),
    "down": RNG.normal(size=(INNER, WIDTH)),
    "square": RNG.normal(size=(WIDTH, WIDTH)),
    "gamma": RNG.normal(size=WIDTH),
    "beta": RNG.normal(size=WIDTH),
    "places": RNG.normal(size=(TOKENS, WIDTH)),
    "table": RNG.normal(size=(20, WIDTH)),
    "epsilon": 1e-5,
    "two": 2.0,
    "fives": np.ones(TOKENS),
    "scale": 0.1,
}
NUMBERS = {
    "zero": 0,
    "minus_one": -1,
    "first": [0],
    "last": [-1],
    "middle": [1],
    "third": [3],
    "minus_three": [-3],
    "some": [4, 0, 4],
    "many": [0, 1, 2, 3, 4, 0, 1],
    "open": [2**63 - 1],
    "inner_axis": [2],
    "step": [2],
    "heads": [0, 0, 2, 4],
    "fixed_heads": [2, 5, 2, 4],
    "joined": [0, 0, 8],
    "flat": [-1, 8],
    "open_heads": [0, 0, -1, 4],
    "open_fixed_heads": [2, 5, -1, 4],
    "mixed_heads": [0, 5, 2, 4],
    "with_one": [0, 0, -1, 1],
    "starts": [1, 1],
    "ends": [3, 3],
    "both": [0, 1],
}


def model(
    body: str,
    choice: str = "y = Gather <axis = 1> (h, i)",
    shape: str = "batch, tokens, 8",
    more: str = "",
    outputs: str = "float[a, b, c] y",
    indices: str = "int64[k]",
    opset: int = 21,
    known: str = "",
) -> onnx.ModelProto:
    """`body` computes h from x; `known` are the shapes of its tensors that ONNX's inference does not find."""
    inputs = f"float[{shape}] x, {indices} i" + (f", {more}" if more else "")
    parsed = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> '
        f"g ({inputs}) => ({outputs}) <{known}> {{ {body} {choice} }}"
    )
    tensors = [(name, np.asarray(values, np.float32)) for name, values in WEIGHTS.items()]
    tensors += [(name, np.asarray(values, np.int64)) for name, values in NUMBERS.items()]
    used = {name for node in parsed.graph.node for name in node.input}
    parsed.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors if n in used)
    return parsed


def feeds(proto: onnx.ModelProto, indices=(3, 0, 3), batch: int = 2) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    sizes = {"batch": batch, "tokens": TOKENS, "rest": WIDTH}
    random = np.random.default_rng(1)
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or sizes.get(d.dim_param, 1) for d in kind.shape.dim]
        if value.name == "i":
            found["i"] = np.array(indices, np.int64).reshape([-1] + [1] * (len(shape) - 1) if shape else [])
        elif kind.elem_type == onnx.TensorProto.INT64:
            found[value.name] = random.integers(0, 20, shape)
        elif kind.elem_type == onnx.TensorProto.BOOL:
            found[value.name] = np.array(True)
        else:
            found[value.name] = random.normal(size=shape).astype(np.float32)
    return found


def chosen_from(proto: onnx.ModelProto, op: str = "Gather") -> set[tuple[str, int]]:
    """Names and axes of the tensors that rows are chosen from."""
    gathers = [node for node in proto.graph.node if node.op_type == op and "/rows" in node.output[0]]
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    if op == "Slice":
        return {(n.input[0], int(numpy_helper.to_array(constants[n.input[3]])[0])) for n in gathers}
    return {(node.input[0], onnx.helper.get_node_attr_value(node, "axis")) for node in gathers}


NORM = "n = LayerNormalization <axis = -1> (x, gamma, beta)"
FORMS = {
    "MatMul": ("h = MatMul (x, up)", {("x", 1)}),
    "residual": (f"{NORM} u = MatMul (n, up) r = Relu (u) d = MatMul (r, down) h = Add (x, d)", {("x", 1)}),
    "gated": (
        """c8 = SimplifiedLayerNormalization <axis = -1> (x, gamma) g = MatMul (c8, up)
        c12 = com.microsoft.QuickGelu (g) u = MatMul (c8, up) m = Mul (c12, u) d = MatMul (m, down) h = Add (d, x)""",
        {("x", 1)},
    ),
    "decomposed norm": (
        """p = Pow (x, two) m = ReduceMean <keepdims = 1> (p, last) e = Add (m, epsilon) s = Sqrt (e)
        r = Reciprocal (s) n = Mul (x, r) h = Mul (gamma, n)""",
        {("x", 1)},
    ),
    "skip norm and its sum": (
        "c8,,,d8 = com.microsoft.SkipLayerNormalization (x, z, gamma, beta) d = MatMul (c8, square) h = Add (d, d8)",
        {("x", 1), ("z", 1)},
    ),
    "skip norm of RMS": (
        "c8,,,d8 = com.microsoft.SkipSimplifiedLayerNormalization (z, x, gamma) h = Sub (d8, c8)",
        {("x", 1), ("z", 1)},
    ),
    "two inputs and one row for all": (
        "s = Add (x, z) t = Add (one_row, s) h = MatMul (t, up)",
        {("x", 1), ("z", 1)},
    ),
    "tokens first": ("t = Transpose <perm = [1, 0, 2]> (x) m = MatMul (t, up) h = Transpose <perm = [1, 0, 2]> (m)",
                     {("x", 1)}),
    "an axis more": ("u = Unsqueeze (x, first) m = MatMul (u, up) h = Squeeze (m, first)", {("x", 1)}),
    "heads": ("r = Reshape (x, heads) s = Softmax <axis = -1> (r) h = Reshape (s, joined)", {("x", 1)}),
    "another axis joined": ("c = Concat <axis = 2> (x, z) h = Softmax <axis = -1> (c)", {("x", 1), ("z", 1)}),
    "parts along another axis": ("m = MatMul (x, up) a, b = Split <axis = 2, num_outputs = 2> (m) h = Mul (a, b)",
                                 {("x", 1)}),
    "part of another axis": ("m = MatMul (x, up) h = Slice (m, middle, third, inner_axis)", {("x", 1)}),
    "one of another axis": ("u = Unsqueeze (x, first) m = MatMul (u, up) h = Gather <axis = 0> (m, zero)", {("x", 1)}),
    "an axis less": ("r = Reshape (x, heads) h = ReduceSum <keepdims = 0> (r, inner_axis)", {("x", 1)}),
    "FusedMatMul": ("c12 = com.microsoft.FusedMatMul <alpha = 0.5> (x, up) h = Relu (c12)", {("x", 1)}),
    "quantised": ("q = QuantizeLinear (x, scale) d = DequantizeLinear (q, scale) h = MatMul (d, up)", {("x", 1)}),
    "condition": ("m = MatMul (x, up) b = Greater (m, two) h = Where (b, m, scale)", {("x", 1)}),
    "ids of an embedding": (
        f"{NORM} e = Gather (table, ids) h = Add (e, n)",
        {("x", 1), ("ids", 1)},
    ),
    "queries of attention": (
        """q = MatMul (x, square) t = Transpose <perm = [0, 2, 1]> (x) s = MatMul (q, t) p = Softmax <axis = -1> (s)
        h = MatMul (p, x)""",
        {("x", 1)},
    ),
}  # fmt: skip
KNOWN = ", ".join(f"float[batch, tokens, {size}] {name}" for name, size in (("c8", 8), ("d8", 8), ("c12", 12)))
KNOWN += ", float[batch, 8, 8] c88"
"""As fusions leave it for operators that ONNX does not know."""
MORE = "float[batch, tokens, 8] z, float[batch, 1, 8] one_row, int64[batch, tokens] ids"


@pytest.mark.parametrize(("body", "border"), FORMS.values(), ids=FORMS)
def test_rows_are_chosen_at_the_border(tools, body, border):
    before = model(body, more=MORE, known=KNOWN)
    after = tools.apply(before, SelectRows(few=["i"]))
    assert after.outcome.rewrites == 1
    assert chosen_from(after.model) == border
    assert len(after.ops) == len(before.graph.node) - 1 + len(border)
    for indices in ((3, 0, 3), (-1,), ()):
        tools.same_outputs(before, after.model, feeds(before, indices), TOLERANCE)


@pytest.mark.parametrize("heads", ["heads", "fixed_heads", "open_heads", "open_fixed_heads"])
def test_sizes_in_a_target_follow_the_rows(tools, heads):
    before = model(f"m = MatMul (x, square) h = Reshape (m, {heads})", shape="2, 5, 8", outputs="float[a, b, c, d] y")
    after = tools.apply(before, SelectRows(few=["i"]))
    assert after.ops == ["Gather", "MatMul", "Reshape"]
    for indices in ((3, 0), ()):
        tools.same_outputs(before, after.model, feeds(before, indices), TOLERANCE)


@pytest.mark.parametrize(
    ("body", "shape", "axis"),
    [
        ("h = Gemm (x, up)", "tokens, 8", 0),
        ("h = Gemm <transA = 1> (x, up, b)", "8, tokens", 1),
        ("h = Gemm (x, square, x)", "tokens, 8", 0),
        ("u = Unsqueeze (x, first) m = MatMul (u, up) r = Reshape (m, row) h = Relu (r)", "tokens, 8", 0),
    ],
)
def test_two_dimensions(tools, body, shape, axis):
    before = model(body, "y = Gather (h, i)", shape, more="float[12] b", outputs="float[a, b] y")
    before.graph.initializer.append(numpy_helper.from_array(np.array([-1, INNER]), "row"))
    after = tools.apply(before, SelectRows(few=["i"]))
    assert chosen_from(after.model) == {("x", axis)}
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)


def test_weights_of_four_bits(tools):
    before = model("h = com.microsoft.MatMulNBits <K = 16, N = 3, bits = 4, block_size = 16> (x, bits, scales)",
                   shape="batch, tokens, 16", known="float[batch, tokens, 3] h")  # fmt: skip
    random = np.random.default_rng(3)
    bits = random.integers(0, 256, (3, 1, 8)).astype(np.uint8)
    scales = random.normal(size=3).astype(np.float32)
    before.graph.initializer.extend([numpy_helper.from_array(bits, "bits"), numpy_helper.from_array(scales, "scales")])
    after = tools.apply(before, SelectRows(few=["i"]))
    assert after.ops == ["Gather", "com.microsoft::MatMulNBits"]
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)
    before.graph.node[1].attribute[0].i = 2
    assert not tools.apply(before, SelectRows(few=["i"])).outcome.changed


LAYER = f"{NORM} u = MatMul (n, square) h = Add (x, u)"
CHOICES = {
    "constant": ("y = Gather <axis = 1> (h, some)", "shape"),
    "negative axis": ("y = Gather <axis = -2> (h, i)", ""),
    "one of unknown": ("y = Gather <axis = 1> (h, last)", ""),
    "cast": ("j = Cast <to = 6> (i) y = Gather <axis = 1> (h, j)", ""),
    "two choices": ("g = Gather <axis = 1> (h, i) e = Gather <axis = 1> (n, i) y = Add (g, e)", ""),
    "choice from the border too": ("g = Gather <axis = 1> (h, i) e = Gather <axis = 1> (x, i) y = Add (g, e)", ""),
    "the same choice twice": ("g = Gather <axis = 1> (h, i) m = MatMul (g, up) y = Gather <axis = 1> (m, i)", ""),
    "choice of a choice": ("g = Gather <axis = 1> (h, i) m = MatMul (g, up) y = Gather <axis = 1> (m, last)", ""),
}


@pytest.mark.parametrize(("choice", "fixed"), CHOICES.values(), ids=CHOICES)
def test_choices_by_indices(tools, choice, fixed):
    before = model(LAYER, choice, shape="2, 5, 8" if fixed else "batch, tokens, 8")
    after = tools.apply(before, SelectRows(few=["i"]))
    assert after.outcome.rewrites == (2 if "MatMul (g" in choice else 1)
    assert ("x", 1) in chosen_from(after.model)
    assert after.ops.index("Gather") < after.ops.index("LayerNormalization")
    tools.same_outputs(before, after.model, feeds(before, (1, 0, 1)), TOLERANCE)


ND = "t = Transpose <perm = [1, 0, 2]> (h) g = GatherND <batch_dims = 0> (t, j) y = Transpose <perm = [1, 0, 2]> (g)"


@pytest.mark.parametrize(
    ("start", "indices"), [("j = Unsqueeze (i, last)", "int64[k]"), ("j = Identity (i)", "int64[k, 1]")]
)
def test_gather_nd(tools, start, indices):
    before = model(LAYER, f"{start} {ND}", indices=indices)
    after = tools.apply(before, SelectRows(few=["i"]))
    assert chosen_from(after.model) == {("x", 1)}
    assert "GatherND" not in after.ops
    tools.same_outputs(before, after.model, feeds(before, (4, 4, 1)), TOLERANCE)
    tools.same_outputs(before, after.model, feeds(before, ()), TOLERANCE)


@pytest.mark.parametrize(
    ("index", "indices", "opset"),
    [("zero", "int64[k]", 21), ("minus_one", "int64[k]", 12), ("i", "int64", 21), ("i", "int64", 12)],
)
def test_one_row_without_its_axis(tools, index, indices, opset):
    body = "m = MatMul (x, square) r = Relu (m) h = Add (x, r)"
    before = model(body, f"y = Gather <axis = 1> (h, {index})", outputs="float[a, b] y", indices=indices, opset=opset)
    after = tools.apply(before, SelectRows())
    assert after.outcome.rewrites == 1
    assert after.ops[-4:] == ["MatMul", "Relu", "Add", "Squeeze"]
    values = feeds(before, 2 if index == "i" else (0,))
    tools.same_outputs(before, after.model, values, TOLERANCE)


@pytest.mark.parametrize(
    "bounds",
    ["first, middle", "last, open", "minus_three, last", "first, third, middle, step"],
)
def test_slices(tools, bounds):
    start, end, *step = bounds.split(", ")
    before = model(LAYER, f"y = Slice ({', '.join([f'h, {start}, {end}', *(step or ['middle'])])})")
    after = tools.apply(before, SelectRows())
    assert after.ops == ["Slice", "LayerNormalization", "MatMul", "Add"]
    assert chosen_from(after.model, "Slice") == {("x", 1)}
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)


GATHER, TWO = "y = Gather <axis = 1> (h, i)", ", float[d, e, f] "
LEFT = {
    "another reader": (LAYER, f"{GATHER} z = Sigmoid (h)", f"{TWO} z"),
    "an output itself": (LAYER, GATHER, f"{TWO} h"),
    "the size is read": ("h = MatMul (x, up)", f"{GATHER} s = Shape (h)", ", int64[3] s"),
    "cheap work only": ("r = Relu (x) h = Mul (r, r)", GATHER, ""),
    "columns": ("h = MatMul (x, square)", "y = Gather <axis = 2> (h, i)", ""),
    "sums over tokens": ("p = Softmax <axis = 1> (x) h = Relu (p)", GATHER, ""),
    "norm over tokens": ("h = LayerNormalization <axis = 1> (x, gamma)", GATHER, ""),
    "mean over tokens": ("h = ReduceMean <keepdims = 1> (x, middle)", "y = Gather <axis = 1> (h, zeros)", ""),
    "tokens joined": ("s = Softmax <axis = -1> (x) h = Concat <axis = 1> (s, s)", GATHER, ""),
    "batch and tokens as one": ("m = MatMul (x, square) f = Reshape (m, flat) h = Unsqueeze (f, first)", GATHER, ""),
    "an operand that may be one row": (
        "c8 = com.microsoft.SkipLayerNormalization (x, w, gamma) h = Relu (c8)",
        GATHER,
        "",
    ),
    "another operator": ("m = MatMul (x, up) h = CumSum (m, zero)", GATHER, ""),
    "two axes of indices": ("h = MatMul (x, up)", "g = Gather <axis = 1> (h, j) y = Squeeze (g, first)", ""),
    "too many": (LAYER, "y = Gather <axis = 1> (h, many)", ""),
    "computed indices": (LAYER, "v = NonZero (i) s = Squeeze (v, first) y = Gather <axis = 1> (h, s)", ""),
    "part of the tokens": ("m = MatMul (x, up) h = Slice (m, middle, open, middle)", GATHER, ""),
    "columns that rows became": ("c88 = com.microsoft.FusedMatMul <transA = 1> (x, x) h = Relu (c88)", GATHER, ""),
    "product with a vector": ("u = Unsqueeze (x, first) h = MatMul (u, gamma)", "y = Gather <axis = 1> (h, last)", ""),
    "scales of tokens": (
        "s = Softmax (x) q = QuantizeLinear <axis = 1> (s, fives) h = DequantizeLinear <axis = 1> (q, fives)",
        GATHER,
        "",
    ),
    "two open sizes": (
        "t = Transpose <perm = [0, 2, 1]> (w) s = Softmax <axis = -1> (t) h = Reshape (s, with_one)",
        GATHER,
        "",
    ),
    "a size beside a copied one": ("s = Softmax <axis = -1> (x) h = Reshape (s, mixed_heads)", GATHER, ""),
    "some of one": ("u = Unsqueeze (x, first) m = MatMul (u, up)", "y = Gather <axis = 0> (m, i)", ""),
    "one of one": ("u = Unsqueeze (x, first) m = MatMul (u, up)", "y = Gather <axis = 0> (m, zero)", ""),
    "pairs": (LAYER, "y = GatherND (h, pair)", ""),
    "batch dimensions": (LAYER, "y = GatherND <batch_dims = 1> (h, j)", ""),
    "slice of unknown length": (LAYER, "y = Slice (h, middle, last, middle)", ""),
    "slice without an end": (LAYER, "y = Slice (h, middle, open, middle)", ""),
    "slice of two axes": (LAYER, "y = Slice (h, starts, ends, both)", ""),
    "dynamic slice": (LAYER, "y = Slice (h, i, open, middle)", ""),
}


@pytest.mark.parametrize(("body", "choice", "outputs"), LEFT.values(), ids=LEFT)
def test_left_alone(tools, body, choice, outputs):
    outputs = outputs.replace(", float[d, e, f] ", ", float[d, e, f]")
    before = model(
        body,
        choice,
        known=KNOWN,
        more="float[batch, rest, 8] w, int64[m, 1] j, int64[m, 2] pair, int64[m] zeros",
        outputs=f"float y{outputs}",
    )
    del before.graph.output[0].type.tensor_type.shape.dim[:]
    before.graph.output[0].type.tensor_type.ClearField("shape")
    after = tools.apply(before, SelectRows(few=["i", "j", "pair", "zeros"]))
    assert not after.outcome.changed
    assert len(after.ops) == len(before.graph.node)


def test_few_are_named(tools):
    before = model(LAYER)
    assert not tools.apply(before, SelectRows()).outcome.changed
    assert not tools.apply(before, SelectRows(few=["j"])).outcome.changed
    computed = model(LAYER, "v = NonZero (i) s = Squeeze (v, first) y = Gather <axis = 1> (h, s)")
    assert not tools.apply(computed, SelectRows(few=["v"])).outcome.changed
    with pytest.raises(ValueError, match="must be a list"):
        SelectRows(few="i")


def test_as_many_indices_as_rows_are_left_alone(tools):
    before = model(LAYER, "y = Gather <axis = 1> (h, many)", shape="2, 5, 8")
    assert not tools.apply(before, SelectRows()).outcome.changed


def test_rows_along_two_axes_of_one_tensor(tools):
    body = "m = MatMul (x, square) t = Transpose <perm = [1, 0, 2]> (m) a = Add (m, t) h = MatMul (a, up)"
    before = model(body, shape="5, 5, 8")
    after = tools.apply(before, SelectRows(few=["i"]))
    assert chosen_from(after.model) == {("m", 0), ("m", 1)}
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)


def test_only_what_no_other_reads_moves(tools):
    """The norm's result is an output: the choice is made behind it, once for each border tensor."""
    before = model(LAYER, outputs="float[a, b, c] y, float[batch, tokens, 8] n")
    after = tools.apply(before, SelectRows(few=["i"]))
    assert chosen_from(after.model) == {("n", 1), ("x", 1)}
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)


def test_an_embedding_with_another_reader_is_looked_up_whole(tools):
    before = model(
        "e = Gather (table, ids) m = MatMul (e, square) h = Add (m, x)",
        more=MORE,
        outputs="float[a, b, c] y, float[batch, tokens, 8] e",
    )
    after = tools.apply(before, SelectRows(few=["i"]))
    assert chosen_from(after.model) == {("e", 1), ("x", 1)}
    tools.same_outputs(before, after.model, feeds(before), TOLERANCE)


@pytest.mark.parametrize("choice", [GATHER, "y = Slice (h, first, middle, middle)"])
def test_subgraphs(tools, choice):
    before = tools.in_branch(model(LAYER, choice))
    after = tools.apply(before, SelectRows(few=["i"]))
    assert after.outcome.rewrites == 2
    assert after.ops[1:5] == [choice.split()[2], "LayerNormalization", "MatMul", "Add"]
    for flag in (True, False):
        tools.same_outputs(before, after.model, feeds(before) | {"flag": np.array(flag)}, TOLERANCE)


def test_a_reader_in_a_subgraph_keeps_a_tensor_whole(tools):
    before = model(LAYER, f"{GATHER} z = If (flag) <then_branch = t () => (float[a, b, c] p) {{ p = Relu (h) }}, "
                   "else_branch = e () => (float[a, b, c] q) { q = Neg (h) }>",
                   more="bool flag", outputs="float[a, b, c] y, float[a, d, c] z")  # fmt: skip
    after = tools.apply(before, SelectRows(few=["i"]))
    assert not after.outcome.changed
    tools.same_outputs(before, after.model, feeds(before), 0)
