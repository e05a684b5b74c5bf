"""Which of SmoothQuant's alphas suits each activation: the one with which least is lost of the products that read it.

Some rows of what really enters the products are quantised with each alpha, as are the weights, and the products'
outputs are compared with those of floats. A row counts by its error relative to itself, so that the few rows with huge
values do not decide. An activation for which no alpha wins, or whose producer cannot be divided, is left as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.quantization.activation_scales import range_after, smoothing_scales
from passes.quantization.layers import Layer, layer_of, name_layers
from passes.quantization.plan import DYNAMIC, LayerPlan, PrecisionPlan
from passes.quantization.products import product_of
from passes.quantization.qdq import activation_parameters
from passes.quantization.rescale import Rescaled, readers, source_of
from passes.quantization.support import Kernels
from passes.quantization.table import CalibrationTable, TensorStatistics
from passes.quantization.weights import quantise_weight, zeros_of
from plugins.quant_matmul.reference import quantize_rows

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_WORTH = 0.95
"""Share of the loss without smoothing that an alpha must fall below: less is chance."""
INTEGER_ACTIVATIONS = (*DYNAMIC, "w8a8")
"""Schemes to which smoothing means anything."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Smoothing:
    """What was found for one activation; `alpha` None: left as it is. Losses are means of relative squared errors."""

    activation: str
    layers: tuple[str, ...]
    alpha: float | None
    loss: float
    loss_without: float


def activations_to_search(graph: gs.Graph, plan: PrecisionPlan) -> list[str]:
    """Names of the tensors that `search_smoothing` wants rows of, in the graph's order."""
    return [tensor.name for tensor, _ in _candidates(graph, plan)]


def search_smoothing(
    graph: gs.Graph, plan: PrecisionPlan, table: CalibrationTable, rows: Mapping[str, Matrix], kernels: Kernels
) -> Iterator[Smoothing]:
    """One for each activation of `activations_to_search`; `rows` has some [n, depth] of each. Changes nothing.

    Raises KilnError for weights that are not finite, and an activation that the table lacks.
    """
    for tensor, tied in _candidates(graph, plan):
        statistics = table.of(tensor.name)
        products = [
            _Alone(layer, plan.of(layer.name), product_of(graph, node, layer, LayerPlan()).weight)
            for node, layer in readers(graph, tensor)
        ]
        quantised = [product for product in products if product.plan.scheme in INTEGER_ACTIVATIONS]
        weights = [product.weight for product in products]
        x = rows[tensor.name]
        without = best = _loss(quantised, x, None, statistics, kernels)
        alpha = None
        for tried in ALPHAS:
            factors = smoothing_scales(statistics.channel_magnitudes, weights, tried, tied)
            loss = _loss(quantised, x, factors, statistics, kernels)
            if loss < min(best, _WORTH * without):
                alpha, best = tried, loss
        yield Smoothing(tensor.name, tuple(product.layer.name for product in quantised), alpha, best, without)


@dataclass(frozen=True)
class _Alone:
    layer: Layer
    plan: LayerPlan
    weight: Matrix


def _candidates(graph: gs.Graph, plan: PrecisionPlan) -> list[tuple[gs.Tensor, NDArray[np.int64] | None]]:
    """Activations that can be divided, with the channels that go together."""
    name_layers(graph)
    found: dict[str, tuple[gs.Tensor, NDArray[np.int64] | None]] = {}
    for node in graph.nodes:
        layer = layer_of(node)
        if layer is None or layer.kind == "Conv" or layer.activation in found:
            continue
        if plan.of(layer.name).scheme not in INTEGER_ACTIVATIONS:
            continue
        tensor = node.inputs[0]
        try:
            readers(graph, tensor)
            found[tensor.name] = (tensor, source_of(graph, tensor, layer.depth, Rescaled()).tied)
        except Refusal:
            continue
    return list(found.values())


def _loss(
    products: list[_Alone], x: Matrix, factors: Matrix | None, statistics: TensorStatistics, kernels: Kernels
) -> float:
    """Mean over rows and products of |y' - y|^2 / |y|^2, y' with integers on both sides."""
    scaled = x if factors is None else x / factors
    losses = []
    for product in products:
        weight = product.weight if factors is None else product.weight * factors[:, None]
        # Better rounding helps each alpha alike, and takes far longer.
        plan = replace(product.plan, rounding="rtn")
        stored = quantise_weight(product.layer.name, weight, plan, zeros=zeros_of(plan, kernels)).values
        exact = x @ product.weight
        error = np.square(_quantised(scaled, product.plan, statistics, factors) @ stored - exact).sum(axis=1)
        losses.append(float(np.mean(error / np.maximum(np.square(exact).sum(axis=1), np.finfo(np.float32).tiny))))
    return float(np.mean(losses))


def _quantised(x: Matrix, plan: LayerPlan, statistics: TensorStatistics, factors: Matrix | None) -> Matrix:
    """Activations as their integers stand for them."""
    if plan.scheme in DYNAMIC:
        q, scale = quantize_rows(x, plan.activation_group_size)
        size = plan.activation_group_size or x.shape[1]
        return np.asarray(q * np.repeat(scale, size, axis=1)[:, : x.shape[1]], np.float32)
    found = statistics.range if factors is None else range_after(statistics, factors)
    parameters = activation_parameters(found, "uint8")
    zero = np.float32(parameters.zero)
    stored = np.clip(np.rint(x / parameters.scale) + zero, 0, 255)
    return np.asarray((stored - zero) * parameters.scale, np.float32)
