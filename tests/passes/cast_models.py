"""What the tests of casting to 16 bits share: models from text, and which types a result has."""

import collections

import numpy as np
import onnx
from onnx import TensorProto, helper, parser

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "kiln" : 1]>'


def model_of(text, opset=21, **weights):
    model = parser.parse_model(HEAD.format(opset=opset) + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in weights.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def normal(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def types_of(model):
    """Element type of every value, by name, weights included."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    found.update({tensor.name: tensor.data_type for tensor in model.graph.initializer})
    return found


def low_ops(applied, kind=HALF):
    """Operators with a 16-bit result, Casts aside."""
    types = types_of(applied.model)
    return [n.op_type for n in applied.model.graph.node if n.op_type != "Cast" and types.get(n.output[0]) == kind]


def casts(applied):
    return collections.Counter(
        helper.get_attribute_value(node.attribute[0]) for node in applied.model.graph.node if node.op_type == "Cast"
    )
