"""Measures the largest magnitude of every FP32 tensor of a model on given inputs, for `passes.cast_precision`.

The model is run by ONNX Runtime's CPU provider without its rewrites, with two reductions to scalars behind every
tensor of the main graph, so activations are never held longer than the run itself holds them. Tensors inside the
bodies of If, Loop and Scan are not measured. Knows nothing of what the ranges are used for.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from engines.backends.onnxruntime import CPU, ort_message, session_from_file
from passes.bind_attention import BindAttention
from passes.graph import graph_from_path, proto_from_graph
from passes.manager import link_weights
from passes.shapes import infer_shapes
from plugins.errors import KilnError


def measure_ranges(
    path: Path, feeds: Iterable[Mapping[str, NDArray]], plugins: Sequence[Path] = (), threads: int | None = None
) -> dict[str, float]:
    """Tensor name to max |value| over all `feeds`: FP32 inputs and results of the main graph's nodes.

    `plugins`: libraries of custom operators. An empty tensor counts as 0; NaNs are passed over. The folder of `path`
    must be writable: the measuring graph lies there for the time of the call, beside links to the weights.
    Raises KilnError for a model or an input that cannot be run, and for no inputs at all.
    """
    graph = graph_from_path(path)
    BindAttention().call(graph)  # the exported operator has no CPU kernel
    infer_shapes(graph)
    tensors = _float_tensors(graph)
    graph.outputs = [output for tensor in tensors for output in _reductions(graph, tensor)]
    ranges = dict.fromkeys((tensor.name for tensor in tensors), 0.0)
    runs = 0
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        measuring = Path(folder) / path.name
        link_weights(path, Path(folder))
        measuring.write_bytes(proto_from_graph(graph).SerializeToString())
        session = session_from_file(measuring, CPU, plugins, threads, optimized=False)
        for feed in feeds:
            try:
                found = session.run(None, dict(feed))
            except Exception as error:
                raise KilnError(f"{path} cannot be run on the given inputs: {ort_message(error)}") from error
            for name, most, least in zip(ranges, found[::2], found[1::2], strict=True):
                ranges[name] = max(ranges[name], float(most), -float(least))
            runs += 1
    if not runs:
        raise KilnError(f"no inputs were given to measure {path} on; expected at least one")
    return ranges


def _float_tensors(graph: gs.Graph) -> list[gs.Variable]:
    made = [tensor for node in graph.nodes for tensor in node.outputs if not tensor.is_empty()]
    return [t for t in (*graph.inputs, *made) if t.dtype == np.float32 and t.type == "tensor_type"]


def _reductions(graph: gs.Graph, tensor: gs.Variable) -> list[gs.Variable]:
    """Scalar maximum and minimum, which need no copy of the tensor as Abs would. -inf and inf for an empty tensor."""
    results = []
    for op in ("ReduceMax", "ReduceMin"):
        result = gs.Variable(f"{tensor.name}/{op}", np.float32, [])
        graph.nodes.append(gs.Node(op, result.name, {"keepdims": 0}, [tensor], [result], domain=""))
        results.append(result)
    return results
