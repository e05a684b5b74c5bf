"""Which quantising passes a plan needs on a target, and what is refused before anything runs."""

import pytest

from passes.onnx_model import DecoderSpec
from passes.quantization.layers import Layer
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.rewrite import check_plan, kernels_of, quantising_passes
from passes.quantization.table import CalibrationTable
from passes.standard import PassTarget
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

DECODER = DecoderSpec(KvSpec((KvLayer(1, 4),), 16, "float32"), 10, 64, ())
LAYERS = [Layer("a.fc", "MatMul", "x", "w", "y", 64, 32), Layer("a.conv", "Conv", "i", "v", "z", 27, 8)]
TABLE = CalibrationTable("m", "d", "minmax", True, {}, {})


def plan(**layers: LayerPlan) -> PrecisionPlan:
    return PrecisionPlan("m", {f"a.{name}": layer for name, layer in layers.items()})


def test_passes_come_in_order_and_only_those_that_the_plan_needs():
    mixed = PrecisionPlan(
        "m",
        {
            "a": LayerPlan("w8a8", smooth=0.5),
            "b": LayerPlan("w4a16", 32, "awq"),
            "c": LayerPlan("w8a8-dynamic"),
            "d": LayerPlan(),
        },
    )
    names = [graph_pass.name for graph_pass in quantising_passes(mixed, TABLE, None, PassTarget())]
    assert names == ["smooth_quant", "scale_for_awq", "insert_qdq", "quantize_weights", "dynamic_int8"]
    weights = quantising_passes(plan(fc=LayerPlan("w8a16", 64)), None, None, PassTarget())
    assert [graph_pass.name for graph_pass in weights] == ["quantize_weights"]
    assert quantising_passes(plan(fc=LayerPlan()), None, None, PassTarget()) == []
    rows = quantising_passes(plan(fc=LayerPlan("w8a8-dynamic")), None, None, PassTarget(decoder=DECODER))
    assert [graph_pass.name for graph_pass in rows] == ["dynamic_int8", "fuse_quantize_rows"]


def test_static_layers_need_a_table():
    for layer in (LayerPlan("w8a8"), LayerPlan("w8a8-dynamic", smooth=0.5)):
        with pytest.raises(KilnError, match="need a calibration table; calibrate first"):
            quantising_passes(plan(fc=layer), None, None, PassTarget())


def test_kernels_by_target():
    assert kernels_of(PassTarget()) == "cpu"
    assert kernels_of(PassTarget(decoder=DECODER)) == "cpu-plugins"
    assert kernels_of(PassTarget("cuda", DECODER)) == "cuda"
    assert kernels_of(PassTarget("tensorrt")) == "tensorrt"


@pytest.mark.parametrize(
    ("layers", "target", "message"),
    [
        (
            {"other": LayerPlan("w8a8")},
            PassTarget(),
            "names the layer 'a.other', which the model lacks; it has 2, such",
        ),
        (
            {"conv": LayerPlan("w4a16")},
            PassTarget(),
            r"layer a\.conv \(Conv\) is planned as w4a16, for which cpu has no kernel; possible are float, w8a8$",
        ),
        ({"fc": LayerPlan("fp8")}, PassTarget(decoder=DECODER), "cpu-plugins has no kernel"),
        ({"fc": LayerPlan("w8a8-dynamic")}, PassTarget("tensorrt"), "possible are float, w8a8, fp8$"),
        ({"fc": LayerPlan("w8a8", 32)}, PassTarget("cuda"), "with groups of 32; cuda takes 0, which is one scale"),
        ({"fc": LayerPlan("fp8", rounding="hqq")}, PassTarget("cuda"), "with hqq; FP8 weights are rounded to nearest"),
        ({"conv": LayerPlan("w8a8", rounding="gptq")}, PassTarget(), "with gptq, which is for matrix products"),
        (
            {"fc": LayerPlan("w8a16", 32, activation_group_size=32)},
            PassTarget(decoder=DECODER),
            "with activations in groups, which Kiln's own dynamic operators alone take",
        ),
    ],
)
def test_plans_that_a_target_cannot_meet(layers, target, message):
    with pytest.raises(KilnError, match=message):
        check_plan(plan(**layers), LAYERS, target)


def test_a_plan_that_can_be_met():
    check_plan(plan(fc=LayerPlan("w4a8-dynamic", 32), conv=LayerPlan("w8a8")), LAYERS, PassTarget(decoder=DECODER))


def test_activations_in_other_groups_than_weights_are_no_plan():
    with pytest.raises(ValueError, match="activation_group_size is 16; expected 0 or group_size, 32"):
        LayerPlan("w8a8-dynamic", 32, activation_group_size=16)
