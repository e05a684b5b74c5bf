"""AWQ: weights that meet large activations get finer steps, by scaling before they are rounded (Lin et al., 2023).

For each activation that products read which are planned with `rounding = "awq"`:

1. factors mean|x|^alpha by channel, with the alpha that loses least of the outputs; what makes the activation is
   divided by them, the weights are multiplied (`passes.quantization.rescale`);
2. where that cannot be divided, or something else reads it too, a `Mul` divides it for these products alone.

Rounding follows in `quantize_weights` or `dynamic_int8`. Left alone, with a note: activations for which no alpha beats
rounding as it is.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome, Refusal
from passes.quantization.activation_scales import awq_scales
from passes.quantization.layers import Layer
from passes.quantization.plan import SCHEMES, PrecisionPlan
from passes.quantization.products import Product, products_of
from passes.quantization.rescale import Rescaled, Source, divide_here, is_rescaled, multiply_rows, readers, source_of
from passes.quantization.support import Kernels
from passes.quantization.table import CalibrationTable
from passes.quantization.weights import grid_of, zeros_of
from plugins.errors import KilnError


class ScaleForAwq:
    """Implements `passes.base.Pass`.

    Mean magnitudes are the table's; without them, roots of the mean squares in `moments` [depth, depth], by layer name;
    without those the table's largest magnitudes.
    """

    name = "scale_for_awq"
    effect = Effect.REORDERS

    def __init__(
        self,
        plan: PrecisionPlan,
        table: CalibrationTable | None = None,
        moments: Mapping[str, NDArray] | None = None,
        rescaled: Rescaled | None = None,
        kernels: Kernels = "cpu",
    ) -> None:
        self.plan = plan
        self.kernels: Kernels = kernels
        self.table = table
        self.moments = moments or {}
        self.rescaled = Rescaled() if rescaled is None else rescaled

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        products = [product for product in products_of(graph, self.plan, SCHEMES) if product.plan.rounding == "awq"]
        tensors = {id(product.activation): product.activation for product in products}
        for tensor in tensors.values():
            group = [product for product in products if product.activation is tensor]
            if any(is_rescaled(product.layer) for product in group):
                continue
            try:
                self._scale(graph, tensor, group)
                outcome.rewrites += 1
            except Refusal as refusal:
                outcome.notes.append(f"{group[0].layer.name}: not scaled, {refusal}")
        return outcome

    def _scale(self, graph: gs.Graph, tensor: gs.Tensor, group: list[Product]) -> None:
        source = self._source(graph, tensor, group)
        layer = group[0].layer
        moments = self.rescaled.moments(layer, self.moments)
        search = awq_scales(
            self._magnitudes(layer, moments),
            [product.weight for product in group],
            [grid_of(product.plan, zeros_of(product.plan, self.kernels)) for product in group],
            moments,
            source.tied if source else None,
        )
        if search.alpha == 0:
            raise Refusal(f"no factors beat rounding as it is ({search.error:.3g} of the outputs)")
        if source is None:
            divide_here(graph, tensor, [product.node for product in group], search.scales)
        else:
            source.divide(search.scales)
        for product in group:
            multiply_rows(graph, product.node, product.layer, search.scales, self.rescaled)

    def _source(self, graph: gs.Graph, tensor: gs.Tensor, group: list[Product]) -> Source | None:
        """What can be divided for the products `group`; None where others read the tensor too, or nothing can."""
        try:
            alone = len(readers(graph, tensor)) == len(group)
            return source_of(graph, tensor, group[0].layer.depth, self.rescaled) if alone else None
        except Refusal:
            return None

    def _magnitudes(self, layer: Layer, moments: NDArray | None) -> NDArray:
        found = self.table.tensors.get(layer.activation) if self.table else None
        magnitudes = np.array(found.mean_magnitudes or found.channel_magnitudes if found else ())
        if moments is not None and not (found and found.mean_magnitudes):
            return np.sqrt(np.diag(moments))
        if magnitudes.shape != (layer.depth,):
            raise KilnError(
                f"layer {layer.name} is planned with AWQ, which needs its input's second moments or the magnitudes of "
                f"its {layer.depth} channels; collect them in calibration, or plan it with rtn or hqq"
            )
        factors = self.rescaled.of(layer)
        return magnitudes if factors is None else magnitudes / factors
