"""SmoothQuant: spread moves from activations, where it costs INT8 its steps, into weights (Xiao et al., 2022).

For each activation that products read of which at least one is planned with `smooth` = alpha:

1. factors max|x|^alpha / max|w|^(1 - alpha) by channel, over all products that read it; what makes the activation is
   divided by them, the weights are multiplied (`passes.quantization.rescale` says which producers can be).

All products that read one activation share the factors: their largest alpha counts. Left alone, with a note:
activations that something else reads too, such as a residual sum, and producers that cannot be divided. Nothing is
added to the graph: same operators, same function, other numbers in the constants.
"""

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.quantization.activation_scales import smoothing_scales
from passes.quantization.layers import layer_of, name_layers
from passes.quantization.plan import PrecisionPlan
from passes.quantization.products import product_of
from passes.quantization.rescale import Rescaled, is_rescaled, multiply_rows, readers, source_of
from passes.quantization.table import CalibrationTable
from plugins.errors import KilnError


class SmoothQuant:
    """Implements `passes.base.Pass`. Writes the factors that it used into `rescaled`."""

    name = "smooth_quant"
    effect = Effect.REORDERS

    def __init__(self, plan: PrecisionPlan, table: CalibrationTable, rescaled: Rescaled | None = None) -> None:
        self.plan = plan
        self.table = table
        self.rescaled = Rescaled() if rescaled is None else rescaled

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        name_layers(graph)
        tensors: dict[str, tuple[gs.Tensor, str]] = {}
        for node in graph.nodes:
            layer = layer_of(node)
            if layer is not None and self.plan.of(layer.name).smooth is not None and not is_rescaled(layer):
                tensors.setdefault(layer.activation, (node.inputs[0], layer.name))
        for tensor, name in tensors.values():
            try:
                self._smooth(graph, tensor)
                outcome.rewrites += 1
            except Refusal as refusal:
                outcome.notes.append(f"{name}: not smoothed, {refusal}")
        return outcome

    def _smooth(self, graph: gs.Graph, tensor: gs.Tensor) -> None:
        found = readers(graph, tensor)
        source = source_of(graph, tensor, found[0][1].depth, self.rescaled)
        magnitudes = self.table.of(tensor.name).channel_magnitudes
        if len(magnitudes) != found[0][1].depth:
            raise KilnError(
                f"the calibration table has {len(magnitudes)} channel magnitudes of '{tensor.name}', which has "
                f"{found[0][1].depth} channels; calibrate again"
            )
        plans = [self.plan.of(layer.name) for _, layer in found]
        weights = [
            product_of(graph, node, layer, plan).weight for (node, layer), plan in zip(found, plans, strict=True)
        ]
        alpha = max(plan.smooth for plan in plans if plan.smooth is not None)
        factors = smoothing_scales(magnitudes, weights, alpha, source.tied)
        source.divide(factors)
        for node, layer in found:
            multiply_rows(graph, node, layer, factors, self.rescaled)
