"""Products on CUDA with weights of 8 or 4 bits: what the pass makes, and that the CPU's form has their arithmetic."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from passes.bind_linear import BindLinear
from passes.graph import graph_from_proto
from passes.quantization.cuda_form import SimulateCuda
from passes.quantization.layers import layers_of
from passes.quantization.plan import LayerPlan, PrecisionPlan, plan_from_toml
from passes.quantization.rescale import Rescaled
from passes.quantization.support import require_supported, supported_schemes
from passes.quantization.weights import quantised_for_cuda
from passes.quantize_linear import QuantizeLinear
from pipeline.cpu_form import needs_cpu_form, write_cpu_form
from plugins.dense.reference import linear, linear_swiglu
from plugins.errors import KilnError
from plugins.quant_matmul.cuda_packing import quantized_rows, restored, unpack
from plugins.quant_matmul.cuda_schema import FORMATS

SCHEMES = {"w8a8-dynamic": "int8", "fp8": "float8e4m3fn", "w4a16": "int4"}
TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to nearest."""


def plan_of(**layers: LayerPlan) -> PrecisionPlan:
    return PrecisionPlan("m", layers)


def product(dtype: str, depth: int, width: int, swiglu: bool = False, bias: bool = False) -> onnx.ModelProto:
    """A product called `fc` between FP32 inputs and outputs, in 16 bits inside."""
    kind, rng = TYPES[dtype], np.random.default_rng(3)
    columns = 2 * width if swiglu else width
    nodes = [helper.make_node("Cast", ["x"], ["h"], to=kind), helper.make_node("MatMul", ["h", "w"], ["p"], name="fc")]
    last = "p"
    if bias:
        nodes.append(helper.make_node("Add", ["p", "b"], ["a"]))
        last = "a"
    if swiglu:
        nodes += [
            helper.make_node("Split", [last, "halves"], ["g", "u"], axis=-1),
            helper.make_node("QuickGelu", ["g"], ["s"], domain="com.microsoft", alpha=1.0),
            helper.make_node("Mul", ["u", "s"], ["m"]),
        ]
        last = "m"
    nodes.append(helper.make_node("Cast", [last], ["y"], to=TensorProto.FLOAT))
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", size])
        for name, size in (("x", depth), ("y", width))
    )
    numbers = helper.tensor_dtype_to_np_dtype(kind)
    weights = {"w": (rng.standard_normal((depth, columns)) * depth**-0.5).astype(numbers)}
    if bias:
        weights["b"] = rng.standard_normal(columns).astype(numbers)
    if swiglu:
        weights["halves"] = np.array([width, width])
    constants = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "m", [given], [made], constants)
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), ("com.microsoft", 1), ("kiln", 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def quantised(tools, model: onnx.ModelProto, graph_pass: QuantizeLinear):
    return tools.apply(tools.apply(model, BindLinear()).model, graph_pass)


def form_of(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "m.onnx")
    path = write_cpu_form(folder / "m.onnx", folder)
    assert not needs_cpu_form(onnx.load(path))
    return onnx.load(path)


def stored(model: onnx.ModelProto) -> tuple[onnx.NodeProto, dict[str, int], dict[str, np.ndarray]]:
    (node,) = (node for node in model.graph.node if node.op_type.startswith("Quant"))
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    return node, attributes, {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_cpus_form_is_the_operators_arithmetic(tools, tmp_path_factory, data) -> None:
    """Against float64, from the bytes in the graph: below and beyond `kernel_rows`, ragged groups, with bias, gated."""
    dtype, scheme = data.draw(st.sampled_from(sorted(TYPES))), data.draw(st.sampled_from(sorted(SCHEMES)))
    swiglu, form = data.draw(st.booleans()), SCHEMES[scheme]
    bias = False if swiglu else data.draw(st.booleans())
    depth, width = 32 * data.draw(st.integers(1, 9)), 16 * data.draw(st.integers(1, 4))
    kernel_rows, rows = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 12))
    group = data.draw(st.sampled_from([0, 128])) if form == "int4" else 0
    layer = LayerPlan(scheme, group_size=group, kernel_rows=kernel_rows)
    applied = quantised(tools, product(dtype, depth, width, swiglu, bias), QuantizeLinear(plan_of(fc=layer)))
    node, attributes, constants = stored(applied.model)
    assert node.name == "fc"
    assert attributes == {"format": FORMATS.index(form), "group_size": group, "kernel_rows": kernel_rows}
    values = restored(unpack(constants[node.input[1]], form), constants[node.input[2]], group)
    x = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((rows, depth)).astype(np.float32)
    low = x.astype(helper.tensor_dtype_to_np_dtype(TYPES[dtype])).astype(np.float32)
    multiplied = low if form == "int4" or rows <= kernel_rows else quantized_rows(low, form)
    added = constants[node.input[3]].astype(np.float64) if bias else None
    expected = (linear_swiglu if swiglu else linear)(multiplied, values, added)
    (found,) = tools.run(form_of(applied.model, tmp_path_factory.mktemp("form")), {"x": x})
    assert np.abs(found - expected).max() <= 1.01 * ROUNDING[dtype] * np.abs(expected).max() + 1e-6


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("swiglu", [False, True])
def test_products_stay_close_to_sixteen_bits(tools, tmp_path, scheme, dtype, swiglu) -> None:
    model = product(dtype, 256, 48, swiglu)
    applied = quantised(tools, model, QuantizeLinear(scheme=scheme))
    wanted = "kiln::QuantLinearSwiGlu" if swiglu else "kiln::QuantLinear"
    assert [op for op in applied.ops if op != "Cast"] == [wanted]
    feeds = {"x": np.random.default_rng(1).standard_normal((50, 256)).astype(np.float32)}
    before, after = (
        tools.run(form_of(one, tmp_path / name), feeds)[0]
        for name, one in (("before", model), ("after", applied.model))
    )
    error = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert 1e-3 < error < {"w8a8-dynamic": 0.02, "fp8": 0.07, "w4a16": 0.2}[scheme]


def test_rows_that_are_no_numbers_stay_visible(tools, tmp_path) -> None:
    for scheme in ("w8a8-dynamic", "fp8"):
        model = quantised(
            tools, product("bfloat16", 32, 16), QuantizeLinear(plan_of(fc=LayerPlan(scheme, kernel_rows=0)))
        )
        x = np.ones((4, 32), np.float32)
        x[0], x[1, 3], x[2, 5] = 0, np.nan, np.inf
        (y,) = tools.run(form_of(model.model, tmp_path / scheme), {"x": x})
        assert (y[0] == 0).all()
        assert not np.isfinite(y[1:3]).any()
        assert np.isfinite(y[3]).all()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_plan_can_be_tried_on_the_float_graph(tools, scheme) -> None:
    """With FP32 activations it computes what the operators will."""
    model, layer = product("float16", 256, 48), LayerPlan(scheme, 128 if scheme == "w4a16" else 0, kernel_rows=8)
    del model.graph.node[0], model.graph.node[-1]
    model.graph.node[0].input[0], model.graph.node[0].output[0] = "x", "y"
    weight = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    tried = tools.apply(model, SimulateCuda(plan_of(fc=layer), {}, Rescaled()))
    assert not any(op.startswith("kiln::Quant") and op != "kiln::QuantizeRows" for op in tried.ops)
    w, scales = quantised_for_cuda("fc", weight, layer)
    values = restored(w, scales, layer.group_size)
    for rows in (8, 9):
        x = np.random.default_rng(rows).standard_normal((rows, 256)).astype(np.float32)
        multiplied = x if rows == 8 or scheme == "w4a16" else quantized_rows(x, SCHEMES[scheme])
        expected = linear(multiplied, values, None)
        np.testing.assert_allclose(tools.run(tried.model, {"x": x})[0], expected, rtol=0, atol=1e-5)


def test_kept_layers_stay_in_sixteen_bits(tools) -> None:
    applied = quantised(tools, product("bfloat16", 64, 32), QuantizeLinear(plan_of(fc=LayerPlan())))
    assert "kiln::Linear" in applied.ops
    assert not applied.outcome.changed


def test_products_in_a_branch_are_no_layers(tools) -> None:
    model = tools.in_branch(product("bfloat16", 64, 32))
    assert not quantised(tools, model, QuantizeLinear()).outcome.changed


@pytest.mark.parametrize(
    ("depth", "width", "scheme", "says"),
    [
        (40, 32, "w8a8-dynamic", "its depth is 40; int8 needs a multiple of 16"),
        (48, 32, "w4a16", "its depth is 48; int4 needs a multiple of 32"),
        (64, 24, "fp8", "its width is 24; float8e4m3fn needs a multiple of 16"),
    ],
)
def test_shapes_without_kernels(tools, depth, width, scheme, says) -> None:
    model = product("float16", depth, width)
    applied = quantised(tools, model, QuantizeLinear(scheme=scheme))
    assert not applied.outcome.changed
    assert applied.outcome.notes == [f"fc: {says}"]
    layer = layers_of(graph_from_proto(product("float16", depth, width)))[0]
    assert scheme not in supported_schemes(layer, "cuda-plugins")
    with pytest.raises(KilnError, match=f"layer fc cannot be {scheme}: {says}; keep it: --keep fc"):
        quantised(tools, model, QuantizeLinear(plan_of(fc=LayerPlan(scheme))))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            LayerPlan("w8a16"),
            "as w8a16, for which cuda-plugins has no kernel; possible are float, w8a8-dynamic",
        ),
        (LayerPlan("w4a16", 64), "groups of 64; expected 0 or a multiple of 128"),
        (LayerPlan("w8a8-dynamic", 128), "groups of 128; expected 0, which is one scale for each output"),
        (LayerPlan("fp8", kernel_rows=65), "kernel_rows of 65; expected 0 to 64"),
        (LayerPlan("w8a8-dynamic", rounding="gptq", smooth=0.5), "both smooth and gptq"),
        (LayerPlan("fp8", rounding="hqq"), "FP8 weights are rounded to nearest"),
    ],
    ids=str,
)
def test_plans_that_the_kernels_lack(plan, says) -> None:
    layer = layers_of(graph_from_proto(product("float16", 256, 64)))[0]
    with pytest.raises(KilnError, match=says):
        require_supported(layer, plan, "cuda-plugins")


def test_a_planned_layer_that_is_no_product_of_kilns_is_an_error(tools) -> None:
    with pytest.raises(KilnError, match="layer other is planned as fp8, but is no product of Kiln's"):
        quantised(tools, product("float16", 64, 32), QuantizeLinear(plan_of(other=LayerPlan("fp8"))))


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="scheme is 'w8a16'; expected one of w8a8-dynamic, fp8, w4a16"):
        QuantizeLinear(scheme="w8a16")


def test_weights_are_rounded_by_the_method_of_the_plan(tools) -> None:
    """GPTQ gives up on weights, to be closer in the outputs; HQQ and rounding to nearest need no data."""
    model, rng = product("float16", 64, 48), np.random.default_rng(0)
    x = rng.standard_normal((400, 64)) @ rng.standard_normal((64, 64))
    weight = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    errors = {}
    for rounding in ("rtn", "hqq", "gptq"):
        layer = LayerPlan("w8a8-dynamic", rounding=rounding)
        applied = quantised(tools, model, QuantizeLinear(plan_of(fc=layer), {"fc": x.T @ x}))
        node, _, constants = stored(applied.model)
        values = restored(unpack(constants[node.input[1]], "int8"), constants[node.input[2]])
        errors[rounding] = np.linalg.norm(x @ (values.T - weight)) / np.linalg.norm(x @ weight)
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert len(set(errors.values())) == 3
    with pytest.raises(KilnError, match="planned with GPTQ, which needs the second moments"):
        quantised(tools, model, QuantizeLinear(plan_of(fc=LayerPlan("w4a16", rounding="gptq"))))


def test_a_plan_says_how_many_rows_the_kernels_take(tmp_path) -> None:
    """None of them is another answer than nobody measured."""
    layers = {"a": LayerPlan("fp8", kernel_rows=0), "b": LayerPlan("fp8"), "c": LayerPlan("fp8", kernel_rows=16)}
    (tmp_path / "plan.toml").write_text(plan_of(**layers).to_toml())
    assert plan_from_toml(tmp_path / "plan.toml").layers == layers


def test_e4m3_numbers_are_all_held_by_float16() -> None:
    """As `cuda_form` stores them for the CPU."""
    numbers = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(numbers.astype(np.float16).astype(np.float32), numbers.astype(np.float32))
