"""A graph's layers by themselves: what each makes of an input that is given to it.

Given what a candidate fed to its version of a layer, the reference's layer shows what it should have made of it: the
difference is the error of that layer alone, whatever came before. Knows nothing of what is compared.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import CPU, session_from_file
from passes.onnx_model import load_structure
from passes.quantization.layers import Layer

LEAN = {"session.disable_prepacking": "1"}
"""Session configuration that leaves weights in their files' pages, which sessions share, instead of packed copies."""
_GIVEN = "given/"
"""Of the names of inputs: one layer's input may be another one's output."""


def layers_alone(
    path: Path, layers: Iterable[Layer], threads: int | None
) -> Callable[[Mapping[str, NDArray]], dict[str, NDArray]]:
    """Takes float32 activations by the name that they have in the graph, all that these layers read; gives the
    layers' outputs by name."""
    layers = list(layers)
    session = session_from_file(path, CPU, (), threads, config=LEAN, graph=_graph(path, layers))
    outputs = [layer.output for layer in layers]
    activations = dict.fromkeys(layer.activation for layer in layers)

    def run(given: Mapping[str, NDArray]) -> dict[str, NDArray]:
        feeds = {_GIVEN + name: np.ascontiguousarray(given[name], np.float32) for name in activations}
        return dict(zip(outputs, session.run(outputs, feeds), strict=True))

    return run


def _graph(path: Path, layers: list[Layer]) -> bytes:
    import onnx

    model = load_structure(path)
    producers = {name: node for node in model.graph.node for name in node.output}
    wanted = {layer.output: layer.activation for layer in layers}
    kept: list[onnx.NodeProto] = []
    for output, activation in wanted.items():
        node = onnx.NodeProto()
        node.CopyFrom(producers[output])
        for name in node.input:
            if name != activation and name in producers and producers[name] not in kept:
                kept.append(producers[name])  # of a weight, such as Transpose
        node.input[:] = [_GIVEN + name if name == activation else name for name in node.input]
        kept.append(node)
    used = {name for node in kept for name in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in used]
    kind = onnx.TensorProto.FLOAT

    def tensors(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
        return [onnx.helper.make_tensor_value_info(name, kind, None) for name in dict.fromkeys(names)]

    inputs, outputs = tensors(_GIVEN + name for name in wanted.values()), tensors(wanted)
    graph = onnx.helper.make_graph(kept, "layers", inputs, outputs, weights)
    alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return alone.SerializeToString()
