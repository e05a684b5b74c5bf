"""The search for SmoothQuant's alphas: it finds what smoothing really gives, and leaves alone what it cannot divide."""

import numpy as np
import onnx
import pytest

from passes.graph import graph_from_proto
from passes.quantization.dynamic_int8 import DynamicInt8
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.rescale import Rescaled
from passes.quantization.smooth_quant import SmoothQuant
from passes.quantization.smooth_search import ALPHAS, activations_to_search, search_smoothing
from tests.passes.quantize_models import after, calibrated, tensors_of, transformer


def plan(*layers: str, scheme: str) -> PrecisionPlan:
    return PrecisionPlan("m", {layer: LayerPlan(scheme) for layer in layers})


def with_large_channel(tools, factor: float) -> onnx.ModelProto:
    """One channel so many times as large as the others."""
    model = transformer(tools, bias=False)
    gamma = next(t for t in model.graph.initializer if t.name == "gamma")
    values = np.ones(32, np.float32)
    values[3] = factor
    gamma.CopyFrom(onnx.numpy_helper.from_array(values, "gamma"))
    return model


def searched(tools, model: onnx.ModelProto, wanted: PrecisionPlan, feeds):
    values = tensors_of(tools, model, feeds)
    graph = graph_from_proto(model)
    rows = {name: values[name].reshape(-1, values[name].shape[-1]) for name in activations_to_search(graph, wanted)}
    return list(search_smoothing(graph, wanted, calibrated(tools, model, feeds), rows, "cpu"))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-dynamic"])
def test_a_large_channel_is_smoothed_with_an_alpha_that_helps(tools, scheme):
    model = with_large_channel(tools, 100)
    feeds = tools.feeds(model)
    (found,) = searched(tools, model, plan("up", "gate", scheme=scheme), feeds)
    assert found.layers == ("up", "gate")
    assert found.alpha in ALPHAS
    assert found.loss < 0.5 * found.loss_without


def test_what_it_foretells_is_what_smoothing_gives(tools):
    """Losses of the products' outputs in the rewritten model, for every alpha."""
    model = with_large_channel(tools, 30)
    feeds = tools.feeds(model)
    (found,) = searched(tools, model, plan("up", "gate", scheme="w8a8-dynamic"), feeds)
    table, exact = calibrated(tools, model, feeds), tensors_of(tools, model, feeds)

    def loss(alpha: float | None) -> float:
        smoothed = PrecisionPlan("m", {name: LayerPlan("w8a8-dynamic", smooth=alpha) for name in ("up", "gate")})
        rescaled = Rescaled()
        passes = [SmoothQuant(smoothed, table, rescaled), DynamicInt8(smoothed, "cpu", None, rescaled)]
        now = tensors_of(tools, after(model, passes), feeds)
        errors = [np.square(now[y] - exact[y]).sum(-1) / np.square(exact[y]).sum(-1) for y in ("h", "g")]
        return float(np.mean(errors))

    assert found.loss_without == pytest.approx(loss(None), rel=1e-3)
    assert found.loss == pytest.approx(loss(found.alpha), rel=1e-3)
    assert found.loss == pytest.approx(min(loss(alpha) for alpha in ALPHAS), rel=1e-3)


def test_only_integer_activations_that_can_be_divided_are_searched(tools):
    graph = graph_from_proto(transformer(tools))
    assert activations_to_search(graph, plan("up", "gate", "down", scheme="w8a8")) == ["n", "a"]
    assert activations_to_search(graph, plan("up", "gate", scheme="w8a16")) == []
    assert activations_to_search(graph, PrecisionPlan("m", {})) == []
    with_reader = transformer(tools)
    with_reader.graph.output.append(onnx.helper.make_tensor_value_info("n", 1, None))
    assert activations_to_search(graph_from_proto(with_reader), plan("up", "gate", scheme="w8a8")) == []
