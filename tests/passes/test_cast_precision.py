"""Casting to 16 bits: islands of FP32, few Casts, subgraphs, equality within the type's precision, BF16."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

from passes.cast_precision import CastPrecision
from passes.manager import run_passes
from passes.onnx_model import onnx_model_from_path
from tests.passes.cast_models import BF16, FLOAT, HALF, casts, low_ops, model_of, normal, types_of


def mlp(spike=1.0):
    """MLP, LayerNormalization, classifier, Softmax; `spike` is how large the first layer's activations become."""
    return model_of(
        """g (float[N, 8] x) => (float[N, 4] y) {
            h1 = MatMul (x, w1)
            h2 = Relu (h1)
            h3 = MatMul (h2, w2)
            n = LayerNormalization <axis = -1> (h3, g, b)
            h4 = MatMul (n, w3)
            h5 = Add (h4, c)
            y = Softmax (h5)
        }""",
        w1=normal(8, 16, seed=1) * spike,
        w2=normal(16, 16, seed=2) / np.float32(spike),
        w3=normal(16, 4, seed=3),
        g=np.ones(16, np.float32),
        b=np.zeros(16, np.float32),
        c=normal(4, seed=4),
    )


def ranges_of(model, feeds):
    """What pipeline.ranges measures."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output]
    del copy.graph.output[:]
    copy.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, None) for name in names)
    found = ReferenceEvaluator(copy).run(None, feeds)
    return {name: float(np.abs(value).max()) for name, value in zip(names, found, strict=True)}


# Rules 1 to 4: what is cast, with how many Casts, and what it costs


def test_products_are_cast_and_norms_are_not(tools):
    before = mlp()
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul", "Relu", "MatMul", "MatMul"]
    assert casts(applied) == {HALF: 2, FLOAT: 2}  # x and n down, h3 and h4 up; the bias is added before Softmax
    types = types_of(applied.model)
    assert types["x"] == types["y"] == types["g"] == types["c"] == FLOAT
    assert {types[f"w{i}/float16"] for i in (1, 2, 3)} == {HALF}
    assert not {"w1", "w2", "w3"} & set(types)
    tools.same_outputs(before, applied.model, {"x": normal(5, 8, seed=9)}, 1e-2)


def test_an_outlier_overflows_without_ranges_and_is_kept_with_them(tools):
    before, feeds = mlp(spike=1e4), {"x": normal(5, 8, seed=9) * 10}
    expected = tools.run(before, feeds)[0]
    ranges = ranges_of(before, feeds)
    assert ranges["h1"] > 1e5
    blind = tools.apply(before, CastPrecision("float16"))
    with np.errstate(all="ignore"):  # ONNX Runtime's CPU provider would compute in FP32 between 16-bit nodes
        assert not np.isfinite(ReferenceEvaluator(blind.model).run(None, feeds)[0]).all()

    seeing = tools.apply(before, CastPrecision("float16", ranges))
    found = tools.run(seeing.model, feeds)[0]
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()
    assert low_ops(seeing) == ["MatMul"]
    assert [note.split(":")[0] for note in seeing.outcome.notes] == [
        "node h1 (MatMul)",
        "node h2 (Relu)",
        "node h3 (MatMul)",
    ]
    assert seeing.outcome.notes[0].endswith("above 65504/4: kept in FP32")
    assert "max |output 'h1'| is " in seeing.outcome.notes[0]
    assert "max |input 'h2'| is " in seeing.outcome.notes[2]


@pytest.mark.parametrize(("value", "kept"), [(16376.0, False), (16377.0, True), (float("inf"), True)])
def test_the_limit_is_a_quarter_of_the_range(tools, value, kept):
    applied = tools.apply(mlp(), CastPrecision("float16", {"h1": value}))
    assert low_ops(applied) == (["MatMul"] * 2 if kept else ["MatMul", "Relu", "MatMul", "MatMul"])
    assert bool(applied.outcome.notes) is kept
    assert not tools.apply(mlp(), CastPrecision("float16", {"h1": 60000.0}, margin=1)).outcome.notes


def test_one_cast_serves_all_readers(tools):
    before = model_of(
        """g (float[4, 8] x) => (float[4, 8] y) {
            a = MatMul (x, w)
            b = MatMul (x, v)
            c = Mul (a, b)
            e = Exp (c)
            s = ReduceSum <keepdims = 1> (c, axes)
            d = Div (e, s)
            y = MatMul (d, w)
        }""",
        w=normal(8, 8, seed=1, scale=0.1),
        v=normal(8, 8, seed=2, scale=0.1),
        axes=np.array([1]),
    )
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul", "MatMul", "Mul", "MatMul"]
    assert casts(applied) == {HALF: 2, FLOAT: 2}  # x and d down; c and y up
    assert [t.name for t in applied.model.graph.initializer if t.data_type == HALF] == ["w/float16", "v/float16"]


def test_light_nodes_between_fp32_neighbours_stay(tools):
    before = model_of(
        """g (float[4, 8] x) => (float[8, 4] y) {
            a = Exp (x)
            b = Transpose (a)
            c = Relu (b)
            y = Exp (c)
        }"""
    )
    applied = tools.apply(before, CastPrecision("float16"))
    assert not applied.outcome.changed
    assert "Cast" not in applied.ops


def test_without_keep_io_inputs_and_outputs_become_16_bit(tools):
    applied = tools.apply(mlp(), CastPrecision("float16", keep_io=False))
    types = types_of(applied.model)
    assert types["x"] == types["y"] == HALF
    assert casts(applied) == {HALF: 2, FLOAT: 2}  # n and y down, h3 and h4 up
    x = normal(5, 8, seed=9)
    found = tools.run(applied.model, {"x": x.astype(np.float16)})[0]
    assert np.abs(found.astype(np.float32) - tools.run(mlp(), {"x": x})[0]).max() <= 1e-2
    applied = tools.apply(mlp(), CastPrecision("float16", {"x": 1e5}, keep_io=False))
    assert types_of(applied.model)["x"] == FLOAT
    assert "max |'x'| is 1e+05, above 65504/4: stays FP32" in applied.outcome.notes


@pytest.mark.parametrize("pattern", ["second", "sec*"])
def test_kept_nodes_by_name(tools, pattern):
    before = mlp()
    before.graph.node[2].name = "second"
    applied = tools.apply(before, CastPrecision("float16", keep=[pattern]))
    assert low_ops(applied) == ["MatMul", "Relu", "MatMul"]
    assert types_of(applied.model)["w2"] == FLOAT


# Subgraphs


def test_works_in_branches(tools):
    before = tools.in_branch(mlp())
    applied = tools.apply(before, CastPrecision("float16"))
    assert applied.outcome.rewrites == 8
    assert applied.ops.count("Cast") == 1 + 2 * 3  # x is cast once, outside
    for flag in (True, False):
        feeds = {"x": normal(3, 8, seed=7), "flag": np.array(flag)}
        tools.same_outputs(before, applied.model, feeds, 1e-2)


def test_values_carried_by_a_loop_keep_their_type(tools):
    body = parser.parse_graph(
        "body (int64 i, bool go, float[2, 8] h) => (bool more, float[2, 8] next) "
        "{ more = Identity (go) a = MatMul (h, w) next = Tanh (a) }"
    )
    loop = helper.make_node("Loop", ["times", "", "start"], ["end"], body=body)
    before = model_of("g (float[2, 8] x) => (float[2, 8] y) { start = MatMul (x, w) }", w=normal(8, 8))
    before.graph.node.append(loop)
    before.graph.node.append(helper.make_node("MatMul", ["end", "w"], ["y"]))
    before.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3), "times"))
    applied = tools.apply(before, CastPrecision("float16"))
    assert applied.outcome.rewrites == 4
    assert [t.name for t in applied.model.graph.initializer if t.data_type == HALF] == ["w/float16"]
    tools.same_outputs(before, applied.model, {"x": normal(2, 8, seed=1)}, 1e-2)


# Weights on disk


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_files_and_a_second_call_on_the_written_model(tmp_path, dtype):
    weight = normal(64, 64, seed=1)
    before = model_of("g (float[N, 64] x) => (float[N, 64] y) { h = MatMul (x, w) y = MatMul (h, w) }", w=weight)
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(before, source, save_as_external_data=True, location="source.data", size_threshold=0)
    cast = CastPrecision(dtype, keep_io=False)
    model, reports = run_passes(onnx_model_from_path(source), target, [cast, cast])
    assert [report.rewrites for report in reports] == [4, 0]
    assert (model.inputs[0].dtype, model.outputs[0].dtype) == (dtype, dtype)
    written = onnx.load(target)
    assert [node.op_type for node in written.graph.node] == ["MatMul", "MatMul"]
    assert [tensor.name for tensor in written.graph.initializer] == [f"w/{dtype}"]
    found = onnx.numpy_helper.to_array(written.graph.initializer[0])
    np.testing.assert_array_equal(found.view(np.uint16), weight.astype(found.dtype).view(np.uint16))


# BF16


def test_bf16_rounds_to_nearest_even(tools):
    before = mlp()
    applied = tools.apply(before, CastPrecision("bfloat16"))
    assert low_ops(applied, BF16) == ["MatMul", "Relu", "MatMul", "MatMul"]
    assert casts(applied) == {BF16: 2, FLOAT: 2}
    weights = {tensor.name: tensor for tensor in applied.model.graph.initializer}
    found = onnx.numpy_helper.to_array(weights["w1/bfloat16"])
    expected = normal(8, 16, seed=1).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    feeds = {"x": normal(5, 8, seed=9)}
    result = ReferenceEvaluator(applied.model).run(None, feeds)[0]
    assert np.abs(result - tools.run(before, feeds)[0]).max() <= 3e-2


def test_bf16_says_which_operators_lack_it(tools):
    before = model_of(
        "g (float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) { y = Conv (x, w) }", opset=21, w=normal(4, 3, 3, 3)
    )
    applied = tools.apply(before, CastPrecision("bfloat16"))
    assert applied.outcome.notes == ["Conv: opset 21 has no bfloat16 form of it: kept in FP32"]
    assert not applied.outcome.changed


def test_options_are_checked():
    with pytest.raises(ValueError, match="dtype is 'int8'; expected one of float16, bfloat16"):
        CastPrecision("int8")
    with pytest.raises(ValueError, match=r"margin is 0\.5; expected at least 1"):
        CastPrecision("float16", margin=0.5)


def test_an_opset_without_bfloat16_is_left_with_a_note(tools):
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul (x, w) }", opset=12, w=normal(4, 4))
    applied = tools.apply(model, CastPrecision("bfloat16"))
    assert applied.ops == ["MatMul"]
    assert applied.outcome.notes == ["bfloat16 needs opset 13; the graph has 12"]


# Rule 6: Q and D


def quantised(opset=21, scale=0.02):
    """x quantised, a product of 8 bits, one of floats that reads the same D, and another of their sum."""
    weight = np.clip(np.round(normal(8, 8, seed=1) / 0.03), -127, 127).astype(np.int8)
    return model_of(
        """g (float[N, 8] x) => (float[N, 4] y) {
            q = QuantizeLinear (x, sx, zx)
            d = DequantizeLinear (q, sx, zx)
            w = DequantizeLinear <axis = 1> (wq, sw, zw)
            h = MatMul (d, w)
            f = MatMul (d, u)
            r = Add (h, f)
            y = MatMul (r, v)
        }""",
        opset=opset,
        sx=np.float32(0.03),
        zx=np.int8(0),
        sw=np.full(8, scale, np.float32),
        zw=np.zeros(8, np.int8),
        wq=weight,
        u=normal(8, 8, seed=3),
        v=normal(8, 4, seed=2),
    )


def products_read_dequantised(applied):
    """Of the product of 8 bits, what makes its operands."""
    makers = {name: node.op_type for node in applied.model.graph.node for name in node.output}
    product = next(node for node in applied.model.graph.node if node.op_type == "MatMul")
    return [makers.get(name) for name in product.input]


def test_q_and_d_follow_what_they_stand_beside(tools):
    before = quantised()
    applied = tools.apply(before, CastPrecision("float16"))
    types = types_of(applied.model)
    assert low_ops(applied) == ["DequantizeLinear", "DequantizeLinear", "MatMul", "MatMul", "Add", "MatMul"]
    assert products_read_dequantised(applied) == ["DequantizeLinear"] * 2
    assert casts(applied) == {FLOAT: 1}  # y; x is quantised as it comes
    assert types["sx"] == FLOAT
    assert types["sx/float16"] == types["sw/float16"] == HALF
    tools.same_outputs(before, applied.model, {"x": normal(5, 8, seed=9)}, 1e-2)


def test_a_scale_that_underflows_keeps_its_product_and_the_d_of_both_is_there_twice(tools):
    before = quantised(scale=1e-8)
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["DequantizeLinear", "MatMul", "Add", "MatMul"]
    assert products_read_dequantised(applied) == ["DequantizeLinear"] * 2
    assert casts(applied) == {HALF: 1, FLOAT: 1}  # what the product of 8 bits gives, and y
    assert "holds 1e-08, which float16 cannot" in applied.outcome.notes[0]
    tools.same_outputs(before, applied.model, {"x": normal(5, 8, seed=9)}, 1e-2)


def test_before_opset_19_products_of_8_bits_stay(tools):
    before = quantised(opset=17)
    applied = tools.apply(before, CastPrecision("float16"))
    assert low_ops(applied) == ["MatMul"]  # of the sum
    assert products_read_dequantised(applied) == ["DequantizeLinear"] * 2
    tools.same_outputs(before, applied.model, {"x": normal(5, 8, seed=9)}, 1e-2)
