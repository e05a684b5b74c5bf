"""Matrix products as the rewrites see them: weight [depth, width], bias [width], and their replacement by a node."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.pack_matmuls import Projection, projection_of
from passes.pattern import is_op, new_constant, producer, replace_node, take_outputs, values_of
from passes.quantization.layers import Layer, layer_of, name_layers
from passes.quantization.plan import LayerPlan, PrecisionPlan, Scheme
from plugins.errors import KilnError


@dataclass(frozen=True)
class Product:
    """A MatMul or Gemm with its bias, which an Add behind a MatMul may add."""

    layer: Layer
    plan: LayerPlan
    projection: Projection

    @property
    def node(self) -> gs.Node:
        return self.projection.product

    @property
    def activation(self) -> gs.Tensor:
        return self.node.inputs[0]

    @property
    def result(self) -> gs.Tensor:
        return self.projection.result

    @property
    def dtype(self) -> np.dtype:
        """Of the weights, and so of the activations."""
        return np.dtype(stored_weight(self.node).dtype)

    @property
    def weight(self) -> NDArray[np.float32]:
        """[depth, width], with Gemm's alpha in it."""
        values = values_of(stored_weight(self.node))
        assert values is not None
        oriented = values.T if self.layer.transposed else values
        return np.asarray(oriented, np.float32) * np.float32(self.node.attrs.get("alpha", 1.0))

    @property
    def bias(self) -> NDArray[np.float32] | None:
        """[width], with Gemm's beta in it; None where there is none."""
        values = values_of(self.projection.bias)
        if values is None:
            return None
        row = np.broadcast_to(values.reshape(-1), (self.layer.width,)).astype(np.float32)
        return row * np.float32(self.node.attrs.get("beta", 1.0))

    def replace(self, scope: gs.Graph, *new: gs.Node) -> None:
        """Put nodes in its place, of which the last gives its result."""
        last = self.projection.last
        new[-1].outputs = take_outputs(last)
        if last is not self.node:
            replace_node(scope, last)
            self.node.outputs.clear()
        replace_node(scope, self.node, *new)


def products_of(graph: gs.Graph, plan: PrecisionPlan, schemes: Collection[Scheme]) -> list[Product]:
    """The matrix products of the main graph that are planned with one of the schemes, in the order of the nodes.

    Raises KilnError for one that computes with a transposed activation, or a bias that is no row of constants.
    """
    name_layers(graph)
    found = []
    for node in graph.nodes:
        layer = layer_of(node)
        if layer is not None and layer.kind != "Conv" and plan.of(layer.name).scheme in schemes:
            found.append(product_of(graph, node, layer, plan.of(layer.name)))
    return found


def product_of(scope: gs.Graph, node: gs.Node, layer: Layer, plan: LayerPlan) -> Product:
    projection = projection_of(scope, node)
    if projection is None and is_op(node, "MatMul"):  # behind a Transpose
        projection = Projection(node, node, None)
    if projection is None:
        raise KilnError(
            f"layer {layer.name} ({layer.kind}) is planned as {plan.scheme}, but its activation is transposed or its "
            "bias is no row of constants; plan it as float"
        )
    return Product(layer, plan, projection)


def stored_weight(node: gs.Node) -> gs.Constant:
    """A layer's weight as it is stored, in front of a Transpose."""
    turned = producer(node.inputs[1], "Transpose")
    return node.inputs[1] if turned is None else turned.inputs[0]


def set_weight(node: gs.Node, layer: Layer, weight: NDArray[np.floating], suffix: str) -> gs.Constant:
    """Give a MatMul or Gemm another weight [depth, width]; others that read the old one keep it."""
    old = stored_weight(node)
    stored = weight.T if layer.transposed and layer.kind == "Gemm" else weight
    node.inputs[1] = new_constant(node.outputs[0], suffix, stored.astype(old.dtype))
    return node.inputs[1]


def readers_of(products: Sequence[Product], tensor: gs.Tensor) -> list[Product]:
    return [product for product in products if product.activation is tensor]
