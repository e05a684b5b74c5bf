"""The linear form of a decoder in the operators that TensorRT's parser has for its own attention layer.

1. Attention(q, k, v, nonpad_kv_seqlen; is_causal, scale) -> TRT_Attention(q * scale, k, v, lengths; lower_right)
2. Attention(q, k, v, mask; scale) -> the same, which may be taken apart where TensorRT has no kernel for it

Rule 1 is not for speed alone: TensorRT's importer of Attention leaves out nonpad_kv_seqlen without a word and takes
is_causal for a mask from the upper left corner (onnx-tensorrt, builtin_op_importers.cpp), which is another function.
Scale is applied before, for TRT_Attention has none. Changes structure only: weights stay in the file that they are in.
"""

from pathlib import Path

import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16 by name)
import numpy as np
import onnx
from onnx import TensorProto, helper

from passes.onnx_model import OnnxModel, load_structure
from plugins.errors import KilnError

OLDEST_NATIVE = (11, 1)
"""TensorRT that has TRT_Attention, with lengths and a causal mask from the lower right corner."""
DOMAIN = "trt"
_LENGTHS = 6
"""Input of Attention."""


def native_graph(model: OnnxModel, target: Path) -> Path:
    """Write it beside `model`, whose weights it uses. Raises KilnError for another folder."""
    if target.parent.resolve() != model.path.parent.resolve():
        raise KilnError(f"{target} is in another folder than {model.path}, whose weights it needs")
    proto = load_structure(model.path)
    assert model.decoder is not None
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(model.decoder.kv.dtype))
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "Attention":
            nodes.append(node)
        elif len(node.input) > _LENGTHS and node.input[_LENGTHS]:
            nodes += _attention(node, proto.graph, dtype)
        else:
            node.attribute.append(helper.make_attribute("TRT_decomposable", 1))
            nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    target.write_bytes(proto.SerializeToString())
    return target


def _attention(node: onnx.NodeProto, graph: onnx.GraphProto, dtype: int) -> list[onnx.NodeProto]:
    scale = next(attribute.f for attribute in node.attribute if attribute.name == "scale")
    constant = f"{node.name}/scale"
    graph.initializer.append(helper.make_tensor(constant, dtype, [1, 1, 1, 1], [scale]))
    scaled, lengths = f"{node.name}/scaled", f"{node.name}/lengths32"
    return [
        helper.make_node("Mul", [node.input[0], constant], [scaled], f"{node.name}/Mul"),
        helper.make_node("Cast", [node.input[_LENGTHS]], [lengths], f"{node.name}/Cast", to=TensorProto.INT32),
        helper.make_node(
            "TRT_Attention",
            [scaled, node.input[1], node.input[2], "", "", lengths],
            list(node.output),
            node.name,
            domain=DOMAIN,
            causal_kind="lower_right",
            TRT_decomposable=1,
        ),
    ]
