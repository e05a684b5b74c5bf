"""Whether a graph computes with the sizes of a profile, asked before TensorRT's builder sees either.

Every input gets its shape at the least, best and most sizes in turn, and ONNX's own shape inference follows them
through the graph. What it refuses, TensorRT would refuse minutes later and without the node's name in its message. It
cannot follow sizes that are computed from an input's values; what depends on those is left to the builder.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from engines.backends.tensorrt.profiles import Profile, Shape
from passes.onnx_model import Tensor, load_structure
from passes.scopes import subgraphs_of
from passes.shapes import hide_values_of_slices
from plugins.errors import KilnError

_SHAPE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Resize": (2, 3),
    "Slice": (1, 2, 4),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "TopK": (1,),
    "OneHot": (1,),
}
"""Inputs of operators whose values decide the shape of the result."""
_KEEPS_VALUES = ("Cast", "Identity", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div")
"""Operators through which sizes are handed on, as exporters write them."""
_AT = re.compile(r"\(op_type:\s*([^,)]+)(?:,\s*node name:\s*([^)]*))?\):?\s*(.*)", re.DOTALL)


def check_profiles(model: Path, inputs: Sequence[Tensor], profiles: Sequence[Profile]) -> None:
    """Raise KilnError naming profile, sizes and node where the graph does not compute with a profile."""
    proto = load_structure(model)
    _refuse_shape_inputs(model, proto, inputs)
    if not profiles:
        raise KilnError(f"{model}: there is no profile; TensorRT needs at least one")
    for profile in profiles:
        corners = [profile.shapes(tensor) for tensor in inputs]
        for number, corner in enumerate(("least", "best", "most")):
            shapes = {tensor.name: shapes[number] for tensor, shapes in zip(inputs, corners, strict=True)}
            _check_corner(model, proto, profile, corner, shapes)


def _check_corner(
    model: Path, proto: "onnx.ModelProto", profile: Profile, corner: str, shapes: Mapping[str, Shape]
) -> None:
    sized = _with_shapes(proto, shapes)
    try:
        onnx.shape_inference.infer_shapes(sized, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        match = _AT.search(str(error))
        operator, name, reason = (match[1], match[2] or "", match[3]) if match else ("", "", str(error))
        node = f"node {name or 'without name'} ({operator})" if operator else "a node"
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise KilnError(
            f"{model}: profile {profile.name} does not fit the graph: at its {corner} sizes {node} fails: "
            f"{' '.join(reason.split())}; the inputs are then {given}: correct the sizes "
            f"({', '.join(f'{symbol} {sizes}' for symbol, sizes in profile.symbols.items())}) or export the model again"
        ) from error


def _with_shapes(proto: "onnx.ModelProto", shapes: Mapping[str, Shape]) -> "onnx.ModelProto":
    """A copy whose inputs have these shapes and that states no others, which would contradict them."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        if value.name in shapes:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, shapes[value.name], strict=True):
                dim.dim_value = size
    del sized.graph.value_info[:]
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    small = [t.name for t in sized.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    for scope in [sized.graph, *subgraphs_of(sized.graph)]:
        hide_values_of_slices(scope, small)
    return sized


def _refuse_shape_inputs(model: Path, proto: "onnx.ModelProto", inputs: Sequence[Tensor]) -> None:
    """Inputs whose values are sizes need values in a profile, which serving does not know."""
    decides = _sizes_from_values(proto)
    for tensor in inputs:
        if tensor.name in decides:
            node, operator = decides[tensor.name]
            raise KilnError(
                f"{model}: the values of input {tensor.name} decide the shape that node {node} ({operator}) gives; "
                "TensorRT would need their bounds in every profile. Export the model with these sizes as dimensions of "
                "its inputs, or fixed"
            )


def _sizes_from_values(proto: "onnx.ModelProto") -> dict[str, tuple[str, str]]:
    """By tensor: the node that takes its values for sizes. Shape's inputs are not among them: only their shape is."""
    found: dict[str, tuple[str, str]] = {}
    for node in reversed(proto.graph.node):
        for index in _SHAPE_OPERANDS.get(node.op_type, ()) if not node.domain else ():
            if index < len(node.input):
                found.setdefault(node.input[index], (node.name or node.output[0], node.op_type))
        if node.op_type in _KEEPS_VALUES and any(name in found for name in node.output):
            reader = next(found[name] for name in node.output if name in found)
            for name in node.input[:1] if node.op_type in ("Gather", "Slice") else node.input:
                found.setdefault(name, reader)
    return found
