"""Layers planned as w8a8 or fp8: weights in 8 bits, activations in 8 bits with calibrated ranges.

With `Q` = QuantizeLinear and `D` = DequantizeLinear, and the placement of `passes.quantization.qdq_placement`:

1. `Conv(x, W, b)` -> `Conv(D(Q(x)), D(W'), b')` with W' int8 by output channel; on a CPU x is uint8 and b' = D of an
   int32 in units of the products, which with a Q behind it `passes.fuse_qdq` makes a QLinearConv;
2. on GPUs `MatMul(x, W)` and `Gemm(x, W, b)` likewise, with int8 or FP8 E4M3, and b as it is;
3. on a CPU `MatMul(x, W) [+ b]` and `Gemm(x, W, b)` -> `com.microsoft::MatMulIntegerToFloat(Q(x), W', ..., b)`, int8
   weights by output and uint8 activations, the operands of VNNI. ONNX Runtime would find the same in Q/DQ, but not with
   a bias: it makes MatMul and Add a float Gemm before it looks.

What else of a network stays in integers on a CPU, such as residual additions and pools, gets Q and D too. Left alone:
layers with other schemes. ONNX Runtime's CUDA provider computes what is between D and Q in floating point.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome
from passes.pattern import (
    CONTRIB,
    consumers,
    input_of,
    is_op,
    new_constant,
    producer,
    values_of,
)
from passes.quantization.activation_scales import range_after
from passes.quantization.layers import Layer, layer_of, name_layers
from passes.quantization.plan import STATIC, LayerPlan, PrecisionPlan, Scheme
from passes.quantization.products import Product, product_of, stored_weight
from passes.quantization.qdq import (
    Parameters,
    Stored,
    activation_parameters,
    dequantise,
    dequantised_constant,
    fp8_weight,
    integer_bias,
    quantise,
    scale_for_bias,
)
from passes.quantization.qdq_placement import EXACT, bounds_of, cpu_placement, exact_result, gpu_placement
from passes.quantization.rescale import Rescaled
from passes.quantization.support import Kernels, require_supported
from passes.quantization.table import CalibrationTable, Range
from passes.quantization.weights import quantise_weight
from plugins.errors import KilnError

_OPSET, _HALF_OPSET = 13, 19
"""Since which Q and D take channels, and FP8 and 16-bit types."""


_Layers = dict[int, tuple[gs.Node, Layer]]
"""By identity of the node."""


@dataclass(frozen=True)
class _Activation:
    parameters: Parameters
    stored: gs.Variable


class InsertQdq:
    """Implements `passes.base.Pass`. `moments` [depth, depth] by layer name are for GPTQ."""

    name = "insert_qdq"
    effect = Effect.QUANTISES

    def __init__(
        self,
        plan: PrecisionPlan,
        table: CalibrationTable,
        kernels: Kernels = "cpu",
        moments: Mapping[str, NDArray] | None = None,
        rescaled: Rescaled | None = None,
    ) -> None:
        self.plan = plan
        self.table = table
        self.kernels: Kernels = kernels
        self.moments = moments or {}
        self.rescaled = Rescaled() if rescaled is None else rescaled
        self.on_cpu = kernels in ("cpu", "cpu-plugins")

    def call(self, graph: gs.Graph) -> Outcome:
        name_layers(graph)
        return Outcome(sum(self._quantise(graph, scheme) for scheme in STATIC))

    def _quantise(self, graph: gs.Graph, scheme: Scheme) -> int:
        layers: _Layers = {}
        for node in graph.nodes:
            layer = layer_of(node)
            if layer is not None and self.plan.of(layer.name).scheme == scheme:
                require_supported(layer, self.plan.of(layer.name), self.kernels)
                self._require_types(graph, node, layer, scheme)
                layers[id(node)] = (node, layer)
        activations = self._activations(graph, layers, scheme) if layers else {}
        for node, layer in layers.values():
            plan, activation = self.plan.of(layer.name), activations[layer.activation]
            if layer.kind == "Conv":
                self._convolution(graph, node, layer, plan, activation.parameters)
            elif self.on_cpu:
                self._integer_product(graph, product_of(graph, node, layer, plan), activation)
            else:
                self._product(graph, product_of(graph, node, layer, plan))
        return len(layers)

    def _activations(self, graph: gs.Graph, layers: "_Layers", scheme: Scheme) -> "dict[str, _Activation]":
        """Insert Q and D where they belong. Matrix products on a CPU are left to be given what Q yields."""
        nodes = [node for node, _ in layers.values()]
        placement = (cpu_placement if self.on_cpu else gpu_placement)(graph, nodes)
        stored: Stored = "float8e4m3fn" if scheme == "fp8" else "uint8" if self.on_cpu else "int8"
        order = {id(t): index for index, node in enumerate(graph.nodes) for t in node.outputs}
        direct = {id(node) for node in nodes if self.on_cpu and not is_op(node, "Conv")}
        made: dict[str, _Activation] = {}
        for tensor in sorted(placement.tensors, key=lambda t: order.get(id(t), -1)):
            parameters = self._parameters(graph, tensor, stored, made, layers)
            places = [
                (node, index)
                for node in consumers(tensor)
                for index, read in enumerate(node.inputs)
                if read is tensor and id(node) not in direct
                if id(tensor) in placement.whole or id(node) in placement.readers
            ]
            places += [(node, index) for node, index in placement.summands if node.inputs[index] is tensor]
            quantised = quantise(graph, tensor, parameters)
            made[tensor.name] = _Activation(parameters, quantised)
            result = dequantise(graph, quantised) if places else None
            for node, index in places:
                node.inputs[index] = result
                made[result.name] = made[tensor.name]  # type: ignore[union-attr]
        return made

    def _parameters(
        self,
        graph: gs.Graph,
        tensor: gs.Tensor,
        stored: Stored,
        made: "Mapping[str, _Activation]",
        layers: "_Layers",
    ) -> Parameters:
        maker = producer(tensor)
        if maker is not None and is_op(maker, *EXACT) and maker.inputs[0].name in made and self.on_cpu:
            return made[maker.inputs[0].name].parameters
        readers = [layers[id(node)][1] for node in consumers(tensor) if id(node) in layers]
        factors = self.rescaled.of(readers[0]) if readers else None
        found = self._range(graph, tensor) if factors is None else range_after(self.table.of(tensor.name), factors)
        return activation_parameters(found, stored, bounds_of(maker))

    def _range(self, graph: gs.Graph, tensor: gs.Tensor) -> Range:
        known = tensor
        while known.name not in self.table.tensors:
            further = exact_result(graph, known)
            if further is None:
                raise KilnError(
                    f"the calibration table has no range of '{tensor.name}', which is stored in 8 bits too; calibrate "
                    "again, observing every tensor"
                )
            known = further
        return self.table.of(known.name).range

    def _require_types(self, graph: gs.Graph, node: gs.Node, layer: Layer, scheme: Scheme) -> None:
        dtype = str(stored_weight(node).dtype)
        least = _OPSET if scheme == "w8a8" and dtype == "float32" else _HALF_OPSET
        where = f"layer {layer.name} is planned as {scheme}"
        if graph.opset < least:
            raise KilnError(f"{where}, which needs opset {least}; the model has {graph.opset}: export it again")
        if self.on_cpu and dtype != "float32":
            raise KilnError(f"{where} on a CPU, but has {dtype} weights; build it with --precision fp32")

    def _convolution(
        self, graph: gs.Graph, node: gs.Node, layer: Layer, plan: LayerPlan, activation: Parameters
    ) -> None:
        values, result, bias = values_of(node.inputs[1]), node.outputs[0], values_of(input_of(node, 2))
        assert values is not None
        if plan.scheme == "fp8":
            stored, parameters = fp8_weight(np.asarray(values, np.float32), 0)
        else:
            matrix = np.asarray(values, np.float32).reshape(layer.width, -1).T
            integers, scales = _integers(layer.name, matrix, plan, bias if self.on_cpu else None, activation)
            stored = np.ascontiguousarray(integers.T).reshape(values.shape)
            parameters = Parameters(scales, np.zeros(layer.width, np.int8))
        node.inputs[1] = dequantised_constant(graph, result, "weight", stored, parameters, 0, node)
        if self.on_cpu and bias is not None:
            units = Parameters(activation.scale * parameters.scale, np.zeros(layer.width, np.int32))
            stored_bias = integer_bias(bias, units.scale)
            node.inputs[2] = dequantised_constant(graph, result, "bias", stored_bias, units, 0, node)

    def _product(self, graph: gs.Graph, product: Product) -> None:
        """Q and D around the weights of a MatMul or Gemm, whose own layout and bias stay."""
        node, layer, weight = product.node, product.layer, product.weight
        weight = weight / np.float32(node.attrs.get("alpha", 1.0))
        is_turned = layer.transposed and layer.kind == "Gemm"
        if product.plan.scheme == "fp8":
            stored, parameters = fp8_weight(weight, 1)
        else:
            found = quantise_weight(layer.name, weight, product.plan, self.rescaled.moments(layer, self.moments))
            stored, parameters = found.integers, Parameters(_usable(found.scales[:, 0]), np.zeros(layer.width, np.int8))
        stored = np.ascontiguousarray(stored.T) if is_turned else stored
        axis = 0 if is_turned else 1
        node.inputs[1] = dequantised_constant(graph, node.outputs[0], "weight", stored, parameters, axis, node)

    def _integer_product(self, graph: gs.Graph, product: Product, activation: "_Activation") -> None:
        layer, result = product.layer, product.result
        found = quantise_weight(layer.name, product.weight, product.plan, self.rescaled.moments(layer, self.moments))
        inputs = [
            activation.stored,
            new_constant(result, "weight", found.integers),
            new_constant(result, "activation_scale", activation.parameters.scale),
            new_constant(result, "weight_scale", _usable(found.scales[:, 0])),
            new_constant(result, "activation_zero", activation.parameters.zero),
            new_constant(result, "weight_zero", np.zeros(layer.width, np.int8)),
        ]
        if product.bias is not None:
            inputs.append(new_constant(result, "bias", product.bias))
        product.replace(graph, gs.Node("MatMulIntegerToFloat", layer.name, {}, inputs, domain=CONTRIB))


def _usable(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales of outputs, 1 where all weights are 0."""
    return np.ascontiguousarray(np.where(scales > 0, scales, 1), np.float32)


def _integers(
    name: str, matrix: NDArray[np.float32], plan: LayerPlan, bias: NDArray | None, activation: Parameters
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """[depth, width] and [width] of a convolution, with scales at which its bias fits an int32."""
    found = quantise_weight(name, matrix, plan)
    scales = scale_for_bias(found.scales[:, 0], bias, activation)
    again = np.clip(np.rint(matrix / scales), -127, 127)
    return np.where(scales == found.scales[:, 0], found.integers, again).astype(np.int8), scales
