"""The layers that quantisation decides about: products with constant weights, by the name of their node.

A layer is a `MatMul(x, W)`, `Gemm(x, W, b)` or `Conv(x, W, b)` whose W is a constant of two or more dimensions and
whose x is not. The W of a MatMul may also be `Transpose(C)` of a constant C, as where an embedding is the weight of the
last product too: the layer's weight is then C, transposed. A node's name is the path of the module that it comes from,
such as `model.layers.0.mlp.gate_proj`, where the exporter knew it. Layers inside bodies of If, Loop and Scan are left
alone.
"""

from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from passes.pattern import input_of, is_op, producer
from plugins.errors import KilnError

Kind = Literal["MatMul", "Gemm", "Conv"]
LAYER_KINDS: tuple[Kind, ...] = ("MatMul", "Gemm", "Conv")
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """One product. `depth` is how many products each output sums: K of a matrix product."""

    name: str
    kind: Kind
    activation: str
    """Tensor that changes from call to call."""
    weight: str
    output: str
    depth: int
    width: int
    """Outputs: N of a matrix product, the channels of a convolution."""
    transposed: bool = False
    """Whether a matrix product's weight is [width, depth] instead of [depth, width]."""
    groups: int = 1
    """Of a convolution."""

    @property
    def parameters(self) -> int:
        return self.depth * self.width


def layers_of(graph: gs.Graph) -> list[Layer]:
    """All layers of the main graph, in the order of its nodes. Raises KilnError where two have one name."""
    layers = [layer for node in graph.nodes if (layer := layer_of(node)) is not None]
    names = [layer.name for layer in layers]
    for name in names:
        if not name or names.count(name) > 1:
            raise KilnError(f"{names.count(name)} layers are called {name!r}; name the nodes of the model apart")
    return layers


def layer_of(node: gs.Node) -> Layer | None:
    """What a node is to quantisation; None where it is nothing."""
    kind = next((kind for kind in LAYER_KINDS if is_op(node, kind)), None)
    activation, weight = (input_of(node, index) for index in range(2))
    turned = producer(weight, "Transpose") if weight is not None and kind == "MatMul" else None
    if turned is not None and len(turned.inputs[0].shape or ()) == 2 and turned.attrs.get("perm", [1, 0]) == [1, 0]:
        weight = turned.inputs[0]
    if kind is None or activation is None or isinstance(activation, gs.Constant) or not isinstance(weight, gs.Constant):
        return None
    if len(weight.shape) < 2 or str(weight.dtype) not in _FLOATS or (kind != "Conv" and len(weight.shape) != 2):
        return None
    transposed = bool(node.attrs.get("transB", 0)) if kind == "Gemm" else weight is not node.inputs[1]
    first, *others = (int(size) for size in weight.shape)
    rest = 1
    for size in others:
        rest *= size
    width, depth = (first, rest) if kind == "Conv" or transposed else (rest, first)
    groups = int(node.attrs.get("group", 1)) if kind == "Conv" else 1
    return Layer(node.name, kind, activation.name, weight.name, node.outputs[0].name, depth, width, transposed, groups)


def name_layers(graph: gs.Graph) -> int:
    """Give each product that has no name, or another's, the name of its result; returns how many got one."""
    taken: set[str] = set()
    products = [node for node in graph.nodes if is_op(node, *LAYER_KINDS)]
    unnamed = []
    for node in products:
        if not node.name or node.name in taken:
            unnamed.append(node)
        taken.add(node.name)
    for node in unnamed:
        node.name = unique_name(node.outputs[0].name, taken)
    return len(unnamed)


def unique_name(name: str, taken: set[str]) -> str:
    """`name`, or it with a number from 2 on where it is taken; joins what is taken."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique
