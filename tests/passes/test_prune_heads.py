"""Structured pruning of attention heads: plain graphs, Attention with shared key/value heads, MultiHeadAttention."""

import numpy as np
import onnx
import pytest
from onnx import parser

from passes.prune import PruneStructure

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "kiln" : 1]>'
HEADS, SIZE, WIDTH = 4, 3, 12


def model_of(text, opset=21, **weights):
    model = parser.parse_model(HEAD.format(opset=opset) + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in weights.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def projections(kv=WIDTH):
    return {
        "wq": normal(8, WIDTH, seed=1),
        "wk": normal(8, kv, seed=2),
        "wv": normal(8, kv, seed=3),
        "wo": normal(WIDTH, 8, seed=4),
    }


def shapes_of(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def masked(model, heads, size=SIZE):
    """The model in which the output projection does not read `heads`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(tensor for tensor in copy.graph.initializer if tensor.name == "wo")
    values = onnx.numpy_helper.to_array(tensor).copy()
    for head in heads:
        values[head * size : (head + 1) * size] = 0
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, "wo"))
    return copy


PLAIN = """g (float[N, 5, 8] x, float[N, 1, 1, 5] mask) => (float[N, 5, 8] y) {{
    q = MatMul (x, wq)
    qb = Add (q, bq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    {shapes}
    q4 = Reshape (qb, split)
    k4 = Reshape (k, split)
    v4 = Reshape (v, split)
    qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    kt = Transpose <perm = [0, 2, 3, 1]> (k4)
    vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    s = MatMul (qt, kt)
    b = Add (s, bias)
    m = Add (mask, b)
    p = Softmax (m)
    o = MatMul (p, vt)
    ot = Transpose <perm = [0, 2, 1, 3]> (o)
    oc = Reshape (ot, join)
    y = MatMul (oc, wo)
}}"""
BATCH = "whole = Shape (x) batch = Slice (whole, zero, one) "
SPELLINGS = {
    "constants": ("", {"split": [0, 5, HEADS, SIZE], "join": [0, 5, WIDTH]}),
    "inferred": ("", {"split": [-1, 5, HEADS, SIZE], "join": [0, 5, -1]}),
    "heads inferred": ("", {"split": [0, 0, -1, SIZE], "join": [0, 0, WIDTH]}),
    "computed": (
        BATCH + "split = Concat <axis = 0> (batch, rows, tail) join = Concat <axis = 0> (batch, rows, all)",
        {"zero": [0], "one": [1], "rows": [5], "tail": [HEADS, SIZE], "all": [WIDTH]},
    ),
}


def plain(spelling, **others):
    shapes, constants = SPELLINGS[spelling]
    constants = {name: np.array(value) for name, value in constants.items()}
    weights = {**projections(), "bq": normal(WIDTH, seed=5), "bias": normal(1, HEADS, 5, 5, seed=6), **others}
    return model_of(PLAIN.format(shapes=shapes), **constants, **weights)


def plain_feeds(seed=9):
    mask = np.zeros((2, 1, 1, 5), np.float32)
    mask[1, ..., 3:] = -1e4
    return {"x": normal(2, 5, 8, seed=seed), "mask": mask}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_of_a_plain_graph(tools, spelling):
    before = plain(spelling)
    applied = tools.apply(before, PruneStructure({"heads:q": [0, 2, 3]}))
    assert applied.outcome.rewrites == 1, applied.outcome.notes
    shapes = shapes_of(applied.model)
    assert {shapes[name] for name in ("wq", "wk", "wv")} == {(8, 9)}
    assert (shapes["wo"], shapes["bq"], shapes["bias"]) == ((9, 8), (9,), (1, 3, 5, 5))
    tools.same_outputs(masked(before, [1]), applied.model, plain_feeds(), 1e-6)


def test_plain_heads_equal_numpy(tools):
    before, feeds = plain("constants"), plain_feeds()
    applied = tools.apply(before, PruneStructure({"heads:q": [1, 2]}))
    weights, x = {t.name: onnx.numpy_helper.to_array(t) for t in before.graph.initializer}, feeds["x"]
    q, k, v = (
        value.reshape(2, 5, HEADS, SIZE).transpose(0, 2, 1, 3)
        for value in (x @ weights["wq"] + weights["bq"], x @ weights["wk"], x @ weights["wv"])
    )
    scores = q @ k.transpose(0, 1, 3, 2) + weights["bias"] + feeds["mask"]
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    heads = shares / shares.sum(-1, keepdims=True) @ v
    heads[:, [0, 3]] = 0
    expected = heads.transpose(0, 2, 1, 3).reshape(2, 5, WIDTH) @ weights["wo"]
    np.testing.assert_allclose(tools.run(applied.model, feeds)[0], expected, atol=1e-4)


def test_a_share_takes_the_lightest_heads(tools):
    weights = projections()
    for name in ("wq", "wk", "wv"):
        weights[name][:, 3:6] = 0
    weights["wo"][3:6] = 0
    before = plain("constants", **weights)
    applied = tools.apply(before, PruneStructure(heads=0.25))
    assert shapes_of(applied.model)["wq"] == (8, 9)
    tools.same_outputs(before, applied.model, plain_feeds(), 1e-6)


def test_works_in_branches(tools):
    before = tools.in_branch(plain("computed"))
    applied = tools.apply(before, PruneStructure({"heads:q_then": [0], "heads:q_else": [0]}))
    assert applied.outcome.rewrites == 2
    for flag in (True, False):
        feeds = {**plain_feeds(), "flag": np.array(flag)}
        tools.same_outputs(masked(before, [1, 2, 3]), applied.model, feeds, 1e-6)


def test_query_key_and_value_packed_in_one_projection(tools):
    weights = projections()
    packed = np.hstack([weights.pop("wq"), weights.pop("wk"), weights.pop("wv")])
    text = PLAIN.format(shapes="").replace(
        "q = MatMul (x, wq)", "all = MatMul (x, w) q, k, v = Split <axis = 2> (all, thirds)"
    )
    for name in ("k", "v"):
        text = text.replace(f"{name} = MatMul (x, w{name})", "")
    constants = {
        "split": np.array([0, 5, HEADS, SIZE]),
        "join": np.array([0, 5, WIDTH]),
        "thirds": np.array([WIDTH] * 3),
    }
    before = model_of(text, w=packed, bq=normal(WIDTH), bias=normal(1, HEADS, 5, 5), **weights, **constants)
    applied = tools.apply(before, PruneStructure({"heads:all": [1, 3]}))
    assert shapes_of(applied.model)["w"] == (8, 18)
    tools.same_outputs(masked(before, [0, 2]), applied.model, plain_feeds(), 1e-6)


COPIES = """pt = Transpose <perm = [0, 2, 1, 3]> (p) r = Concat <axis = 2> (pt, pt) u = Slice (r, zero, four, two)
    pp = Transpose <perm = [0, 2, 1, 3]> (u) o = MatMul (pp, vt)"""
COUNTED = "heads = Shape <start = 1, end = 2> (bias) split = Concat <axis = 0> (front, heads, size) q4 = "


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("o = MatMul (p, vt)", COPIES, "at node r (Concat): puts the units beside others"),
        ("Softmax (m)", "Softmax <axis = 1> (m)", "at node p (Softmax): works along the units"),
        ("q4 = ", COUNTED, "(Reshape): entry 2 of its shape is computed"),
        ("qb = Add (q, bq)", "qb = LayerNormalization (q, bq)", "at node qb (LayerNormalization)"),
    ],
)
def test_near_misses(tools, old, new, reason):
    assert old in PLAIN
    text = PLAIN.format(shapes="").replace(old, new)
    constants = {"split": [0, 5, HEADS, SIZE], "join": [0, 5, WIDTH], "zero": [0], "four": [HEADS], "two": [2]}
    constants |= {"front": [0, 5], "size": [SIZE]}
    if "split = " in text:
        del constants["split"]
    weights = {**projections(), "bq": normal(WIDTH), "bias": normal(1, HEADS, 5, 5)}
    arrays = {name: np.array(value) for name, value in constants.items()}
    applied = tools.apply(model_of(text, **weights, **arrays), PruneStructure(heads=0.5))
    assert not applied.outcome.changed
    assert any(reason in note for note in applied.outcome.notes), applied.outcome.notes


def test_multi_head_attention_with_a_packed_bias(tools):
    before = model_of(
        """g (float[N, 5, 8] x) => (float[N, 5, 8] y) <float[N, 5, 12] a> {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            a = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, b, , relative)
            y = MatMul (a, wo)
        }""",
        **projections(),
        b=normal(3 * WIDTH, seed=5),
        relative=normal(1, HEADS, 5, 5, seed=6),
    )
    applied = tools.apply(before, PruneStructure({"heads:q": [0, 3]}))
    shapes = shapes_of(applied.model)
    assert (shapes["wq"], shapes["wo"], shapes["b"], shapes["relative"]) == ((8, 6), (6, 8), (18,), (1, 2, 5, 5))
    node = next(node for node in applied.model.graph.node if node.op_type == "MultiHeadAttention")
    assert [a.i for a in node.attribute if a.name == "num_heads"] == [2]
    tools.same_outputs(masked(before, [1, 2]), applied.model, {"x": normal(2, 5, 8, seed=9)}, 1e-5)


def test_shared_key_value_heads_go_with_their_query_heads(tools):
    before = model_of(
        """g (float[N, 5, 8] x) => (float[N, 5, 8] y) {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            a = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v, mask)
            y = MatMul (a, wo)
        }""",
        opset=23,
        **projections(kv=2 * SIZE),
        mask=normal(HEADS, 5, 5, seed=6),
    )
    light = {"wk": 0.01, "wv": 0.01}
    for tensor in before.graph.initializer:
        if tensor.name in light:
            values = onnx.numpy_helper.to_array(tensor).copy()
            values[:, :SIZE] *= light[tensor.name]
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    applied = tools.apply(before, PruneStructure(heads=0.5))
    shapes = shapes_of(applied.model)
    assert [shapes[name] for name in ("wq", "wk", "wv", "wo", "mask")] == [(8, 6), (8, 3), (8, 3), (6, 8), (2, 5, 5)]
    node = next(node for node in applied.model.graph.node if node.op_type == "Attention")
    assert {a.name: a.i for a in node.attribute} == {"q_num_heads": 2, "kv_num_heads": 1}
    tools.same_outputs(masked(before, [0, 1]), applied.model, {"x": normal(2, 5, 8, seed=9)}, 1e-5)


@pytest.mark.parametrize("domain", ["com.microsoft", "kiln"])
def test_heads_of_a_paged_cache_are_refused(tools, domain):
    before = model_of(
        f"""g (float[T, 8] x, float[B, 4, 4, 3] kc, float[B, 4, 4, 3] vc, int32[S] cu, int32[P] past, int32[P, M] table,
            int32[T] slots) => (float[T, 8] y, float[B, 4, 4, 3] kn, float[B, 4, 4, 3] vn) <float[T, 12] o> {{
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            o, kn, vn = {domain}.PagedAttention <num_heads = 4, kv_num_heads = 4> (
                q, k, v, kc, vc, cu, past, table, , , slots)
            y = MatMul (o, wo)
        }}""",
        **projections(),
    )
    applied = tools.apply(before, PruneStructure(heads=0.5))
    assert not applied.outcome.changed
    assert any(
        "PagedAttention): the number of KV heads is part of the cache's layout" in n for n in applied.outcome.notes
    )


def test_attention_with_a_cache_of_its_own_is_refused(tools):
    before = model_of(
        """g (float[N, 5, 8] x, float[N, 4, P, 3] pk, float[N, 4, P, 3] pv) => (float[N, 5, 8] y) <float[N, 5, 12] a> {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            a = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, , , , pk, pv)
            y = MatMul (a, wo)
        }""",
        **projections(),
    )
    applied = tools.apply(before, PruneStructure(heads=0.5))
    assert not applied.outcome.changed
    assert any("it has a cache, whose layout its heads are part of" in note for note in applied.outcome.notes)
