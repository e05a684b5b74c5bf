"""Element types of a graph's tensors: by ONNX's inference, and for Kiln's own operators by their schemas."""

from collections.abc import Mapping

import onnx

from plugins.abi import OPERATORS

_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int32": onnx.TensorProto.INT32,
}


def element_types(proto: onnx.ModelProto) -> Mapping[str, int]:
    """Tensor name to onnx.TensorProto.DataType. A tensor whose type cannot be told is left out."""
    inferred = onnx.shape_inference.infer_shapes(proto)
    found = {value.name: value.type.tensor_type.elem_type for value in _values(inferred.graph)}
    found |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    specs = {(spec.domain, spec.op_type): spec for spec in OPERATORS}
    for node in proto.graph.node:
        spec = specs.get((node.domain, node.op_type))
        for tensor, name in zip(spec.outputs if spec else (), node.output, strict=False):
            if len(tensor.dtypes) == 1 and tensor.dtypes[0] in _TYPES:
                found[name] = _TYPES[tensor.dtypes[0]]
    return {name: kind for name, kind in found.items() if name and kind}


def _values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.output, *graph.value_info]
