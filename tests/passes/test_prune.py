"""Structured pruning of channels and residual branches: consistent cuts, masked equality, budgets, refusals."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from passes.graph import graph_from_path, graph_from_proto, proto_from_graph
from passes.prune import PruneStructure
from passes.prune_groups import find_groups
from passes.shapes import infer_shapes
from passes.validate import check_graph
from passes.weights import consolidate

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "kiln" : 1]>'


def model_of(text, opset=21, **weights):
    model = parser.parse_model(HEAD.format(opset=opset) + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in weights.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def shapes_of(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def groups_of(model):
    graph = graph_from_proto(model)
    check_graph(graph)
    infer_shapes(graph)
    found, reasons = find_groups(graph)
    return {group.name: group.units for group in found}, reasons


def with_weights(model, **weights):
    """The model with other values for some weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
    return copy


def zeroed(values, axis, entries):
    result = values.copy()
    np.moveaxis(result, axis, 0)[entries] = 0
    return result


# Rule 1: feed-forward channels

W = {"up": normal(8, 12, seed=1), "gate": normal(8, 12, seed=2), "down": normal(12, 8, seed=3), "b": normal(12, seed=4)}
GATED = """g (float[N, 8] x) => (float[N, 8] y) {
    u = MatMul (x, up)
    v = Add (u, b)
    g = MatMul (x, gate)
    s = Sigmoid (g)
    silu = Mul (g, s)
    h = Mul (silu, v)
    y = MatMul (h, down)
}"""


def test_gated_feed_forward_equals_the_masked_model(tools):
    before = model_of(GATED, **W)
    assert groups_of(before)[0] == {"ffn:u": 12}
    kept = [0, 2, 3, 7, 11]
    applied = tools.apply(before, PruneStructure({"ffn:u": kept}))
    assert applied.outcome.rewrites == 1
    assert shapes_of(applied.model) == {"up": (8, 5), "gate": (8, 5), "down": (5, 8), "b": (5,)}
    x = normal(4, 8, seed=9)
    gate = x @ W["gate"]
    hidden = gate / (1 + np.exp(-gate)) * (x @ W["up"] + W["b"])
    hidden[:, [unit for unit in range(12) if unit not in kept]] = 0
    np.testing.assert_allclose(tools.run(applied.model, {"x": x})[0], hidden @ W["down"], atol=1e-4)


@pytest.mark.parametrize(
    ("text", "weights", "sizes"),
    [
        ("u = MatMul (x, up) h = Relu (u) y = MatMul (h, down)", {}, {"up": (8, 9), "down": (9, 8)}),
        ("u = MatMul (x, up) h = com.microsoft.BiasGelu (u, b) y = MatMul (h, down)", {}, {"b": (9,)}),
        ("u = Gemm (x, up, b) h = Tanh (u) y = Gemm (h, down)", {}, {"up": (8, 9), "b": (9,), "down": (9, 8)}),
        (
            "u = Gemm <transB = 1> (x, upT, b) h = Tanh (u) y = Gemm <transB = 1> (h, downT)",
            {"upT": W["up"].T.copy(), "downT": W["down"].T.copy()},
            {"upT": (9, 8), "downT": (8, 9)},
        ),
        ("u = MatMul (x, up) h = PRelu (u, b) t = Mul (b, h) y = MatMul (t, down)", {}, {"b": (9,), "down": (9, 8)}),
        (
            "u = MatMul (x, both) p, q = Split <axis = 1, num_outputs = 2> (u) h = Mul (q, p) y = MatMul (h, down)",
            {"both": np.hstack([W["up"], W["gate"]])},
            {"both": (8, 18), "down": (9, 8)},
        ),
        (
            "u = MatMul (x, both) p, q = Split <axis = -1> (u, sizes) h = Mul (q, p) y = MatMul (h, down)",
            {"both": np.hstack([W["up"], W["gate"]]), "sizes": np.array([12, 12])},
            {"both": (8, 18), "down": (9, 8)},
        ),
    ],
)
def test_spellings_of_a_feed_forward_block(tools, text, weights, sizes):
    weights = {**{name: value for name, value in W.items() if f" {name}" in text}, **weights}
    before = model_of(f"g (float[4, 8] x) => (float[4, 8] y) {{ {text} }}", **weights)
    kept = [0, 1, 2, 3, 5, 6, 8, 10, 11]
    applied = tools.apply(before, PruneStructure({"ffn:u": kept}))
    found = shapes_of(applied.model)
    assert {name: found[name] for name in sizes} == sizes
    reader = "downT" if "downT" in weights else "down"
    masked = zeroed(weights[reader], 1 if reader == "downT" else 0, [4, 7, 9])
    tools.same_outputs(with_weights(before, **{reader: masked}), applied.model, {"x": normal(4, 8, seed=7)}, 1e-6)


def test_a_share_removes_units_that_are_zero_and_keeps_the_outputs(tools):
    dead = [1, 5, 6]
    weights = {"up": zeroed(W["up"], 1, dead), "gate": zeroed(W["gate"], 1, dead), "down": zeroed(W["down"], 0, dead)}
    before = model_of(GATED, **{**W, **weights})
    applied = tools.apply(before, PruneStructure(ffn=0.25))
    assert shapes_of(applied.model)["down"] == (9, 8)
    tools.same_outputs(before, applied.model, {"x": normal(4, 8, seed=5)}, 1e-6)


@pytest.mark.parametrize(("share", "multiple", "left"), [(0.25, 1, 9), (0.3, 1, 9), (0.3, 8, 12), (0.5, 4, 8)])
def test_shares_round_down_and_to_multiples(tools, share, multiple, left):
    applied = tools.apply(model_of(GATED, **W), PruneStructure(ffn=share, multiple=multiple))
    assert shapes_of(applied.model)["up"] == (8, left)
    assert applied.outcome.changed is (left < 12)


def test_weights_shared_with_other_nodes_stay_whole_there(tools):
    text = GATED.replace(
        "y = MatMul (h, down)", "d = MatMul (h, down) z = Transpose (up) t = MatMul (d, up) y = MatMul (t, z)"
    )
    before = model_of(text, **W)
    applied = tools.apply(before, PruneStructure({"ffn:u": [3, 4]}))
    assert shapes_of(applied.model)["up"] == (8, 12)
    masked = with_weights(before, down=zeroed(W["down"], 0, [0, 1, 2, *range(5, 12)]))
    tools.same_outputs(masked, applied.model, {"x": normal(3, 8)}, 1e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("y = MatMul (x, up)", "its units reach the graph's output 'y'"),
        ("u = MatMul (x, up) h = Add (u, r) y = MatMul (h, down)", "its units reach the graph's input 'r'"),
        ("u = MatMul (x, up) h = LayerNormalization (u, b) y = MatMul (h, down)", "at node h (LayerNormalization)"),
        ("u = MatMul (x, up) h = Softmax (u) y = MatMul (h, down)", "at node h (Softmax): works along the units"),
        ("u = MatMul (x, up) h = Concat <axis = 1> (u, u) y = MatMul (h, both)", "at node h (Concat)"),
        ("u = MatMul (x, up) h = Add (u, n) y = MatMul (h, down)", "at node h (Add): operand 'n'"),
        ("u = MatMul (x, up) t = Transpose (u) y = MatMul (u, t)", "multiplies the units with each other"),
    ],
)
def test_what_cannot_be_followed_is_left_alone(tools, text, reason):
    weights = {name: value for name, value in W.items() if f" {name}" in text}
    if "both" in text:
        weights["both"] = normal(24, 8)
    width = 12 if "y = MatMul (x" in text else 4 if "(u, t)" in text else 8
    inputs = "float[4, 8] x, float[4, 12] r, float[4, k] n"
    before = model_of(f"g ({inputs}) => (float[4, {width}] y) {{ {text} }}", **weights)
    applied = tools.apply(before, PruneStructure(ffn=0.5))
    assert not applied.outcome.changed
    assert any(reason in note for note in applied.outcome.notes)
    named = tools.apply(before, PruneStructure({"ffn:u": [0]}))
    assert not named.outcome.changed
    assert len(named.outcome.notes) == 1


def test_works_in_branches(tools):
    before = tools.in_branch(model_of(GATED, **W))
    names = sorted(groups_of(before)[0])
    assert names == ["ffn:u_else", "ffn:u_then"]
    applied = tools.apply(before, PruneStructure({name: [1, 2, 9] for name in names}))
    assert applied.outcome.rewrites == 2
    masked = with_weights(before, down=zeroed(W["down"], 0, [0, 3, 4, 5, 6, 7, 8, 10, 11]))
    for flag in (True, False):
        tools.same_outputs(masked, applied.model, {"x": normal(3, 8), "flag": np.array(flag)}, 1e-6)


# Rule 1: channels of convolutions


def conv_model():
    """Convolution with batch norm, depthwise, squeeze-and-excite and a residual addition, pooled and classified."""
    return model_of(
        """g (float[N, 3, 6, 6] x) => (float[N, 5] y) {
            c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
            n1 = BatchNormalization (c1, s, b, m, v)
            r1 = Relu (n1)
            d1 = Conv <group = 8, pads = [1, 1, 1, 1]> (r1, dw, db)
            p1 = GlobalAveragePool (d1)
            e1 = Conv (p1, se1)
            e2 = Relu (e1)
            e3 = Conv (e2, se2)
            e4 = Sigmoid (e3)
            q1 = Mul (d1, e4)
            c2 = Conv (q1, w2)
            c3 = Conv (c2, w3)
            a1 = Add (c3, r1)
            g1 = ReduceMean <keepdims = 0> (a1, axes)
            y = Gemm <transB = 1> (g1, head)
        }""",
        w1=normal(8, 3, 3, 3, seed=1),
        b1=normal(8, seed=2),
        s=normal(8, seed=3),
        b=normal(8, seed=4),
        m=normal(8, seed=5),
        v=np.abs(normal(8, seed=6)),
        dw=normal(8, 1, 3, 3, seed=7),
        db=normal(8, seed=8),
        se1=normal(4, 8, 1, 1, seed=9),
        se2=normal(8, 4, 1, 1, seed=10),
        w2=normal(6, 8, 1, 1, seed=11),
        w3=normal(8, 6, 1, 1, seed=12),
        head=normal(5, 8, seed=13),
        axes=np.array([2, 3]),
    )


def test_channels_of_convolutions_with_all_that_touches_them(tools):
    before = conv_model()
    assert groups_of(before)[0] == {"conv:c1": 8, "conv:e1": 4, "conv:c2": 6, "layers": 1}
    kept = {"conv:c1": [0, 3, 4, 6, 7], "conv:e1": [1, 2], "conv:c2": [0, 5]}
    applied = tools.apply(before, PruneStructure(kept))
    shapes = shapes_of(applied.model)
    assert shapes["w1"] == (5, 3, 3, 3)
    assert shapes["dw"] == (5, 1, 3, 3)
    assert {shapes[name] for name in ("b1", "s", "b", "m", "v", "db")} == {(5,)}
    assert [shapes[name] for name in ("se1", "se2", "w2", "w3", "head")] == [
        (2, 5, 1, 1),
        (5, 2, 1, 1),
        (2, 5, 1, 1),
        (5, 2, 1, 1),
        (5, 5),
    ]
    assert next(a.i for n in applied.model.graph.node for a in n.attribute if a.name == "group") == 5
    # masking where units are read
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in before.graph.initializer}
    gone = [1, 2, 5]
    masked = with_weights(
        before,
        se1=zeroed(weights["se1"], 1, gone),
        se2=zeroed(weights["se2"], 1, [0, 3]),
        w2=zeroed(weights["w2"], 1, gone),
        w3=zeroed(weights["w3"], 1, [1, 2, 3, 4]),
        head=zeroed(weights["head"], 1, gone),
    )
    tools.same_outputs(masked, applied.model, {"x": normal(2, 3, 6, 6, seed=20)}, 1e-5)


def test_flattened_channels_and_a_grouped_convolution(tools):
    flat = model_of(
        "g (float[N, 3, 4, 4] x) => (float[N, 5] y) { c = Conv (x, w) r = Relu (c) f = Flatten (r) y = MatMul (f, h) }",
        w=normal(4, 3, 3, 3),
        h=normal(16, 5, seed=1),
    )
    applied = tools.apply(flat, PruneStructure({"conv:c": [0, 2]}))
    assert shapes_of(applied.model) == {"w": (2, 3, 3, 3), "h": (8, 5)}
    masked = with_weights(flat, h=zeroed(normal(16, 5, seed=1), 0, [4, 5, 6, 7, 12, 13, 14, 15]))
    tools.same_outputs(masked, applied.model, {"x": normal(2, 3, 4, 4)}, 1e-6)
    grouped = model_of(
        "g (float[N, 3, 4, 4] x) => (float[N, 4, 4, 4] y) { c = Conv (x, w) y = Conv <group = 2> (c, v) }",
        w=normal(4, 3, 1, 1),
        v=normal(4, 2, 1, 1),
    )
    assert "its channels are in 2 groups" in groups_of(grouped)[1]["c"]


# Rule 3: residual branches


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_branches_are_dropped(tools, norm):
    def block(i, source):
        if norm == "pre":
            return f"n{i} = LayerNormalization ({source}, s) f{i} = MatMul (n{i}, w) x{i} = Add ({source}, f{i}) "
        return f"f{i} = MatMul ({source}, w) a{i} = Add (f{i}, {source}) x{i} = LayerNormalization (a{i}, s) "

    def model(blocks):
        text = " ".join(block(i, source) for i, source in blocks) + f" y = Relu (x{blocks[-1][0]})"
        return model_of(f"g (float[N, 8] x) => (float[N, 8] y) {{ {text} }}", w=normal(8, 8), s=normal(8, seed=1))

    before = model([(0, "x"), (1, "x0"), (2, "x1"), (3, "x2")])
    assert groups_of(before)[0] == {"layers": 4}
    applied = tools.apply(before, PruneStructure({"layers": [0, 3]}))
    assert applied.ops.count("MatMul") == applied.ops.count("Add") == 2
    assert applied.ops.count("LayerNormalization") == (2 if norm == "pre" else 4)
    feeds = {"x": normal(3, 8, seed=4)}
    if norm == "pre":
        tools.same_outputs(model([(0, "x"), (3, "x0")]), applied.model, feeds)
    assert np.isfinite(tools.run(applied.model, feeds)[0]).all()


def test_the_lightest_branch_goes_even_where_it_makes_the_output(tools):
    before = model_of(
        "g (float[N, 8] x) => (float[N, 8] y) { f = MatMul (x, w) a = Add (x, f) h = MatMul (a, v) y = Add (h, a) }",
        w=normal(8, 8),
        v=normal(8, 8) * np.float32(0),
    )
    applied = tools.apply(before, PruneStructure(layers=0.5))
    assert applied.ops == ["MatMul", "Add"]
    tools.same_outputs(before, applied.model, {"x": normal(3, 8, seed=4)}, 1e-6)


def test_sums_that_are_no_residuals(tools):
    gelu = "c = Mul (x, x) q = Mul (c, x) y = Add (x, q)"
    broadcast = "p = ReduceMean <keepdims = 1> (x) f = MatMul (x, w) y = Add (p, f)"
    for text in (gelu, broadcast, "f = MatMul (x, w) g = MatMul (x, w) y = Add (f, g)"):
        weights = {"w": normal(8, 8)} if "w)" in text else {}
        before = model_of(f"g (float[N, 8] x) => (float[N, 8] y) {{ {text} }}", **weights)
        assert not tools.apply(before, PruneStructure(layers=0.9)).outcome.changed


# Options


def test_misuse_is_explained(tools):
    for options in ({"ffn": 1.0}, {"heads": -0.1}, {"multiple": 0}, {"keep": {"a": []}}, {"keep": {"a": [-1]}}):
        with pytest.raises(ValueError, match="expected"):
            PruneStructure(**options)
    outcome = tools.apply(model_of(GATED, **W), PruneStructure({"ffn:u": [0, 12], "ffn:z": [0]})).outcome
    assert outcome.notes == [
        "group 'ffn:u' cannot be pruned: unit 12 is to be kept, but it has 12 units",
        "group 'ffn:z' cannot be pruned: there is none of this name; there are ffn:u",
    ]


@pytest.mark.slow
def test_a_quarter_of_minilm(tmp_path):
    """Real weights, mapped; only those that are cut are read."""
    pytest.importorskip("torch")
    from pipeline.config import BuildConfig
    from pipeline.export import export_model
    from pipeline.load import describe, load
    from pipeline.source import resolve_source

    source = resolve_source("minilm")
    exported = tmp_path / "minilm.onnx"
    export_model(load(source, describe(source)), exported, BuildConfig())
    graph = graph_from_path(exported)
    check_graph(graph)
    infer_shapes(graph)
    assert PruneStructure(ffn=0.25).call(graph).rewrites == 6
    check_graph(graph)
    pruned = tmp_path / "pruned.onnx"
    consolidate(graph, tmp_path / "pruned.data")
    pruned.write_bytes(proto_from_graph(graph).SerializeToString())
    session = onnxruntime.InferenceSession(pruned, providers=["CPUExecutionProvider"])
    ids = np.arange(1000, 1012).reshape(2, 6)
    found = session.run(None, {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0})
    assert [value.shape for value in found] == [(2, 6, 384), (2, 384)]
    assert all(np.isfinite(value).all() for value in found)
    saved = exported.with_name("minilm.onnx.data").stat().st_size - pruned.with_name("pruned.data").stat().st_size
    assert saved == pytest.approx(6 * 384 * (2 * 384 + 1) * 4, rel=0.1)
