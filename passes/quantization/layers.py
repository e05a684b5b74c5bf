"""The layers that quantisation decides about: products with constant weights, by the name of their node.

A layer is a `MatMul(x, W)`, `Gemm(x, W, b)` or `Conv(x, W, b)` whose W is a constant of two or more dimensions and
whose x is not. A node's name is the path of the module that it comes from, such as `model.layers.0.mlp.gate_proj`,
where the exporter knew it. Layers inside the bodies of If, Loop and Scan are left alone.
"""

from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from passes.pattern import input_of, is_op
from plugins.errors import KilnError

Kind = Literal["MatMul", "Gemm", "Conv"]
_KINDS: tuple[Kind, ...] = ("MatMul", "Gemm", "Conv")
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
    kind = next((kind for kind in _KINDS if is_op(node, kind)), None)
    activation, weight = (input_of(node, index) for index in range(2))
    if kind is None or activation is None or isinstance(activation, gs.Constant) or not isinstance(weight, gs.Constant):
        return None
    if len(weight.shape) < 2 or str(weight.dtype) not in _FLOATS or (kind != "Conv" and len(weight.shape) != 2):
        return None
    transposed = bool(node.attrs.get("transB", 0)) if kind == "Gemm" else False
    first, *others = (int(size) for size in weight.shape)
    rest = 1
    for size in others:
        rest *= size
    width, depth = (first, rest) if kind == "Conv" or transposed else (rest, first)
    groups = int(node.attrs.get("group", 1)) if kind == "Conv" else 1
    return Layer(node.name, kind, activation.name, weight.name, node.outputs[0].name, depth, width, transposed, groups)
