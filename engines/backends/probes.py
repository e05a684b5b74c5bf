"""A graph that shows some of its inner tensors, made when a model is looked into; never served."""

from collections.abc import Sequence
from pathlib import Path

from plugins.errors import KilnError

PREFIX = "probe/"
"""Of the names of the further outputs."""


def graph_with_probes(engine: Path, tensors: Sequence[str]) -> bytes:
    """The .onnx file's bytes, without its external weights, with tensors of the main graph as further outputs.

    Each is float32, whatever it is inside, and named `PREFIX` + its own name. Raises KilnError for an unknown tensor.
    """
    import onnx

    model = onnx.load(engine, load_external_data=False)
    known = {value.name for value in model.graph.input} | {name for node in model.graph.node for name in node.output}
    for tensor in tensors:
        if tensor not in known:
            raise KilnError(f"{engine} computes no tensor '{tensor}' in its main graph")
        shown = PREFIX + tensor
        model.graph.node.append(onnx.helper.make_node("Cast", [tensor], [shown], name=shown, to=onnx.TensorProto.FLOAT))
        model.graph.output.append(onnx.helper.make_tensor_value_info(shown, onnx.TensorProto.FLOAT, None))
    return model.SerializeToString()
