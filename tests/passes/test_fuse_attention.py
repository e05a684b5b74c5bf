"""FuseAttention: spellings of product, scale, mask and layout; near misses; subgraphs; numbers."""

import numpy as np
import onnx
import pytest
from onnx import parser

from passes.fuse_attention import FuseAttention

CONTRIB, STANDARD = "com.microsoft::MultiHeadAttention", "Attention"
TOLERANCE = 2e-6
LOWEST = float(np.finfo(np.float32).min)
CONSTANTS = f"""
heads = Constant<value_ints=[0, 0, 2, 4]>()
flat = Constant<value_ints=[0, 0, 8]>()
half = Constant<value_float=0.5>()
root = Constant<value_float=0.7>()
two = Constant<value_float=2.0>()
one = Constant<value_float=1.0>()
zero = Constant<value_float=0.0>()
negative = Constant<value_float=-inf>()
lowest = Constant<value_float={LOWEST!r}>()
small = Constant<value_float=-10000.0>()
c0 = Constant<value_ints=[0]>()
c1 = Constant<value_ints=[1]>()
c2 = Constant<value_ints=[2]>()
c3 = Constant<value_ints=[3]>()
open = Constant<value_ints=[-1]>()
""".replace("<value_float=-inf>", "<value = float {-inf}>")
PROJECTED = """
q4 = Reshape(q, heads)
k4 = Reshape(k, heads)
v4 = Reshape(v, heads)
query = Transpose<perm=[0, 2, 1, 3]>(q4)
key = Transpose<perm=[0, 2, 1, 3]>(k4)
value = Transpose<perm=[0, 2, 1, 3]>(v4)
"""
TURNED = "turned = Transpose<perm=[0, 1, 3, 2]>(key)\n"
PRODUCT = TURNED + "raw = MatMul(query, turned)\nscores = Mul(raw, half)\n"
REST = """
p = Softmax<axis=-1>(masked)
result = MatMul(p, value)
rows = Transpose<perm=[0, 2, 1, 3]>(result)
y = Reshape(rows, flat)
"""
UNMASKED = REST.replace("masked", "scores")
GUARD = (
    "weights = Softmax<axis=-1>(masked)\nbad = IsNaN(weights)\np = Where(bad, zero, weights)\n" + REST.split("\n", 2)[2]
)
BODY = PROJECTED + PRODUCT + UNMASKED
MERGED = """
sizes = Shape(key)
keys = Slice(sizes, c2, c3)
leading = Slice(sizes, c0, c2)
size = Slice(sizes, c3, c4)
c4 = Constant<value_ints=[4]>()
three = Concat<axis=0>(open, keys, size)
k3 = Reshape(key, three)
t3 = Transpose<perm=[0, 2, 1]>(k3)
four = Concat<axis=0>(leading, size, keys)
turned = Reshape(t3, four)
"""


def model_of(body: str, mask: str = "", keys: str = "S", opset: int = 21, y: str = "float[B,S,8]") -> onnx.ModelProto:
    lines = [line for line in (CONSTANTS + body).splitlines() if line.strip()]
    lines.sort(key=lambda line: "Constant<" not in line)
    given = f", {mask} mask" if mask else ""
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> '
        f"m (float[B,S,8] q, float[B,{keys},8] k, float[B,{keys},8] v{given}) => ({y} y) {{ {chr(10).join(lines)} }}"
    )


def feeds(mask: np.ndarray | None = None, keys: int = 5) -> dict[str, np.ndarray]:
    generator = np.random.default_rng()
    found = {name: generator.standard_normal((3, n, 8), np.float32) for name, n in (("q", 5), ("k", keys), ("v", keys))}
    return found if mask is None else found | {"mask": mask}


def scale_of(model: onnx.ModelProto) -> float:
    (node,) = (node for node in model.graph.node if node.op_type in ("MultiHeadAttention", "Attention"))
    return next(attribute.f for attribute in node.attribute if attribute.name == "scale")


PRODUCTS = {
    "scaled behind": (PRODUCT, 0.5),
    "divided behind": (PRODUCT.replace("Mul(raw, half)", "Div(raw, two)"), 0.5),
    "scaled query": (TURNED + "scaled = Mul(half, query)\nscores = MatMul(scaled, turned)\n", 0.5),
    "divided query": (TURNED + "scaled = Div(query, two)\nscores = MatMul(scaled, turned)\n", 0.5),
    "both scaled": (
        TURNED + "sq = Mul(query, root)\nsk = Mul(turned, root)\nscores = MatMul(sq, sk)\n",
        0.7 * 0.7,
    ),
    "key scaled before its transpose": (
        "sk = Mul(key, half)\nturned = Transpose<perm=[0, 1, 3, 2]>(sk)\nscores = MatMul(query, turned)\n",
        0.5,
    ),
    "one transpose for the key": ("turned = Transpose<perm=[0, 2, 3, 1]>(k4)\nscores = MatMul(query, turned)\n", 1.0),
    "batch and heads merged around the key's transpose": (
        MERGED + "sq = Mul(query, root)\nsk = Mul(turned, root)\nscores = MatMul(sq, sk)\n",
        0.7 * 0.7,
    ),
}


@pytest.mark.parametrize(("target", "opset", "op"), [("onnxruntime", 21, CONTRIB), ("standard", 23, STANDARD)])
@pytest.mark.parametrize("spelling", PRODUCTS)
def test_products_and_scales(tools, spelling, target, opset, op):
    product, scale = PRODUCTS[spelling]
    model = model_of(PROJECTED + product + UNMASKED, opset=opset)
    applied = tools.apply(model, FuseAttention(target))
    assert applied.ops == [op]
    assert applied.outcome.rewrites == 1
    assert scale_of(applied.model) == pytest.approx(scale)
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


ADDED = "masked = Add(scores, mask)\n"
MASKS = {
    "full": ("float[B,1,S,S]", ADDED, (3, 1, 5, 5), []),
    "swapped": ("float[B,1,S,S]", "masked = Add(mask, scores)\n", (3, 1, 5, 5), []),
    "per head": ("float[1,2,S,S]", ADDED, (1, 2, 5, 5), []),
    "of keys": ("float[B,1,1,S]", ADDED, (3, 1, 1, 5), ["Shape", "Gather", "Concat", "Expand"]),
    "of one batch": ("float[1,1,1,S]", ADDED, (1, 1, 1, 5), ["Shape", "Gather", "Concat", "Expand"]),
    "of rank 2": ("float[S,S]", ADDED, (5, 5), ["Unsqueeze"]),
    "condition": ("bool[B,1,S,S]", "masked = Where(mask, scores, lowest)\n", (3, 1, 5, 5), ["Where"]),
    "condition, turned": ("bool[B,1,S,S]", "masked = Where(mask, negative, scores)\n", (3, 1, 5, 5), ["Where"]),
    "condition of keys": (
        "bool[B,1,1,S]",
        "masked = Where(mask, scores, lowest)\n",
        (3, 1, 1, 5),
        ["Where", "Shape", "Gather", "Concat", "Expand"],
    ),
}


def mask_of(kind: str, shape: tuple[int, ...], turned: bool = False) -> np.ndarray:
    generator = np.random.default_rng()
    if kind.startswith("float"):
        return generator.standard_normal(shape, np.float32)
    attended = generator.random(shape) < 0.6
    attended[..., 0] = True
    return ~attended if turned else attended


@pytest.mark.parametrize(("target", "opset", "op"), [("onnxruntime", 21, CONTRIB), ("standard", 23, STANDARD)])
@pytest.mark.parametrize("what", MASKS)
def test_masks(tools, what, target, opset, op):
    kind, node, shape, added = MASKS[what]
    model = model_of(PROJECTED + PRODUCT + node + REST, kind, opset=opset)
    applied = tools.apply(model, FuseAttention(target))
    assert applied.ops == [*added, op]
    tools.same_outputs(model, applied.model, feeds(mask_of(kind, shape, "turned" in what)), TOLERANCE)


@pytest.mark.parametrize("target", ["onnxruntime", "standard"])
def test_a_guard_keeps_rows_without_any_key_zero(tools, target):
    model = model_of(PROJECTED + PRODUCT + ADDED + GUARD, "float[B,1,S,S]", opset=23)
    applied = tools.apply(model, FuseAttention(target))
    assert applied.ops == [CONTRIB if target == "onnxruntime" else STANDARD, "IsNaN", "Where"]
    mask = np.zeros((3, 1, 5, 5), np.float32)
    mask[0], mask[1, :, 2], mask[2, :, :, 1:] = -np.inf, -np.inf, -np.inf
    given = feeds(mask)
    tools.same_outputs(model, applied.model, given, TOLERANCE)
    assert not tools.run(applied.model, given)[0][0].any()


def test_two_layers_share_an_expanded_mask(tools):
    second = (PROJECTED + PRODUCT + ADDED + REST).replace("(q, heads)", "(y, heads)")
    names = ["q4", "k4", "v4", "query", "key", "value", "turned", "raw", "scores", "masked", "p", "result", "rows"]
    for name in names:
        second = second.replace(f"{name} =", f"{name}_2 =").replace(f"({name},", f"({name}_2,")
        second = second.replace(f", {name})", f", {name}_2)").replace(f"({name})", f"({name}_2)")
    body = PROJECTED + PRODUCT + ADDED + REST + second.replace("y =", "z =")
    model = model_of(body, "float[B,1,1,S]")
    model.graph.output[0].name = "z"
    applied = tools.apply(model, FuseAttention())
    assert sorted(applied.ops) == sorted(["Shape", "Gather", "Concat", "Expand", CONTRIB, CONTRIB])
    tools.same_outputs(model, applied.model, feeds(mask_of("float", (3, 1, 1, 5))), TOLERANCE)


def test_cross_attention(tools):
    model = model_of(PROJECTED + PRODUCT + ADDED + REST, "float[B,1,1,T]", keys="T")
    applied = tools.apply(model, FuseAttention())
    assert applied.ops == ["Shape", "Gather", "Concat", "Expand", CONTRIB]
    tools.same_outputs(model, applied.model, feeds(mask_of("float", (3, 1, 1, 7)), keys=7), TOLERANCE)


def test_operands_that_are_no_projections_are_laid_out(tools):
    body = BODY.replace("MatMul(query", "MatMul(positive").replace("raw =", "positive = Relu(query)\nraw =", 1)
    model = model_of(body.replace("y = Reshape(rows, flat)", "y = Relu(rows)"), y="float[B,S,2,4]")
    applied = tools.apply(model, FuseAttention())
    assert applied.ops == ["Reshape", "Transpose", "Relu", "Transpose", "Reshape", CONTRIB, "Reshape", "Relu"]
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_older_opsets(tools):
    model = model_of(PROJECTED + PRODUCT + ADDED + REST, "float[S,S]", opset=17)
    applied = tools.apply(model, FuseAttention())
    assert applied.ops == ["Unsqueeze", CONTRIB]
    tools.same_outputs(model, applied.model, feeds(mask_of("float", (5, 5))), TOLERANCE)


def test_subgraphs(tools):
    model = tools.in_branch(model_of(PROJECTED + PRODUCT + ADDED + GUARD, "float[B,1,1,S]"))
    applied = tools.apply(model, FuseAttention())
    assert applied.ops.count(CONTRIB) == applied.outcome.rewrites == 2
    assert "Softmax" not in applied.ops
    for flag in (True, False):
        given = feeds(mask_of("float", (3, 1, 1, 5))) | {"flag": np.array(flag)}
        tools.same_outputs(model, applied.model, given, TOLERANCE)


MASKED = PROJECTED + PRODUCT + ADDED + REST
NEAR_MISSES = {
    "softmax over queries": (BODY.replace("axis=-1", "axis=2"), "", None),
    "softmax over heads": (BODY.replace("axis=-1", "axis=1"), "", None),
    "key not transposed": (BODY.replace("perm=[0, 1, 3, 2]", "perm=[0, 1, 2, 3]"), "", None),
    "result in another order": (
        BODY.replace("rows = Transpose<perm=[0, 2, 1, 3]>", "rows = Transpose<perm=[0, 1, 2, 3]>"),
        "",
        None,
    ),
    "scaled by a vector": (
        BODY.replace("Mul(raw, half)", "Mul(raw, vector)")
        + "vector = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0]>()",
        "",
        None,
    ),
    "divisor and dividend swapped": (BODY.replace("Mul(raw, half)", "Div(two, raw)"), "", None),
    "probabilities read elsewhere": (BODY + "again = Relu(p)", "", "probabilities 'p' are read elsewhere"),
    "scores read elsewhere": (BODY + "again = Relu(raw)", "", "scores 'raw' are read elsewhere"),
    "result read elsewhere": (BODY + "again = Relu(result)", "", None),
    "mask of unknown size": (MASKED, "float[B,1,S,T]", "is not known to broadcast"),
    "mask of other heads": (MASKED, "float[B,M,S,S]", "is not known to broadcast"),
    "mask of another rank": (MASKED, "float[1,B,1,S,S]", "is not known to broadcast"),
    "a small number instead of a score": (
        MASKED.replace("Add(scores, mask)", "Where(mask, scores, small)"),
        "bool[B,1,S,S]",
        "masked scores become -10000; expected at most -1e+30",
    ),
    "a guard that puts in another number": (
        (PROJECTED + PRODUCT + ADDED + GUARD).replace("Where(bad, zero", "Where(bad, one"),
        "float[B,1,S,S]",
        None,
    ),
    "a scale of nothing": (BODY.replace("Mul(raw, half)", "Mul(raw, zero)"), "", "the scale is 0.0"),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_stay(tools, what):
    body, mask, note = NEAR_MISSES[what]
    model = model_of(body, mask, y="float[]")
    if "again" in body:
        model.graph.output.append(onnx.helper.make_tensor_value_info("again", 1, None))
    applied = tools.apply(model, FuseAttention())
    assert not applied.outcome.changed
    assert CONTRIB not in applied.ops
    assert [note in text for text in applied.outcome.notes] == ([True] if note else [])


def test_probabilities_that_are_an_output_stay(tools):
    model = model_of(BODY)
    model.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, ["B", 2, "S", "S"]))
    applied = tools.apply(model, FuseAttention())
    assert not applied.outcome.changed
    assert "probabilities 'p' are read elsewhere" in applied.outcome.notes[0]


def test_a_dynamic_number_of_heads_stays(tools):
    body = BODY.replace("(q, heads)", "(q, some)") + "counts = Shape(k)\nfew = Slice(counts, c1, c2)\n"
    body += "some = Concat<axis=0>(zeros, few, open)\nzeros = Constant<value_ints=[0, 0]>()"
    lines = body.splitlines()
    order = [line for line in lines if line.startswith(("counts", "few", "some"))]
    applied = tools.apply(
        model_of("\n".join([*order, *(line for line in lines if line not in order)])), FuseAttention()
    )
    assert not applied.outcome.changed
    assert "expected a known number and size of heads" in applied.outcome.notes[0]


def test_heads_in_a_reshape_left_open_are_known(tools):
    model = model_of(BODY.replace("heads)", "open_heads)") + "open_heads = Constant<value_ints=[0, 0, -1, 4]>()")
    applied = tools.apply(model, FuseAttention())
    assert applied.ops == [CONTRIB]
    tools.same_outputs(model, applied.model, feeds(), TOLERANCE)


def test_an_attention_node_stays(tools):
    body = "y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v)"
    for target in ("onnxruntime", "standard"):
        applied = tools.apply(model_of(body, opset=23), FuseAttention(target))
        assert applied.ops == [STANDARD]
        assert not applied.outcome.changed


def test_other_types_stay(tools):
    lines = BODY.replace("half", "half_").splitlines()
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (double[B,S,8] q, double[B,S,8] k, double[B,S,8] v) => '
        "(double[B,S,8] y) { heads = Constant<value_ints=[0, 0, 2, 4]>() flat = Constant<value_ints=[0, 0, 8]>() "
        f"half_ = Constant<value = double {{0.5}}>() {chr(10).join(lines)} }}"
    )
    applied = tools.apply(model, FuseAttention())
    assert not applied.outcome.changed
    assert "its type is float64" in applied.outcome.notes[0]


def test_standard_needs_opset_23(tools):
    applied = tools.apply(model_of(BODY), FuseAttention("standard"))
    assert applied.outcome.notes == ["Attention is standard from opset 23; the graph has 21"]
