"""Runs a model with chosen inner tensors as outputs: sample by sample, prompts in chunks through the paged cache.

The graph is cut to what those tensors need and runs on ONNX Runtime's CPU provider. One chunk's tensors are held at a
time. Knows nothing of what is done with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from engines.backends.onnxruntime import CPU, ort_message, session_from_file
from passes.bind_attention import BindAttention
from passes.graph import graph_from_path, proto_from_graph
from passes.shapes import infer_shapes
from pipeline.calibration.samples import TOKENS, Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.io_layout import to_model
from pipeline.packed import step_of_chunk
from plugins.errors import KilnError
from plugins.paged_attention.schema import cache_names, cache_output_names

Tensors = dict[str, NDArray[np.float32]]


def prepared_graph(model: CalibrationModel) -> gs.Graph:
    """A model's graph with attention bound to the CPU's operator, and with the types that can be inferred."""
    graph = graph_from_path(model.model.path)
    BindAttention().call(graph)  # the exported operator has no CPU kernel
    infer_shapes(graph)
    return graph


@dataclass(frozen=True)
class _Aliased:
    """A cache's input and the output that shares its memory."""

    source: str
    target: str
    layer: int


class ObservingSession:
    """`tensors` of a model as float32 outputs, in this order. Raises KilnError for a model that cannot be loaded.

    `shapes` gives their shapes instead of their values, as int64 arrays. Memory for the cache of one sample of
    `longest` tokens is held until the session is dropped.
    """

    def __init__(
        self,
        model: CalibrationModel,
        tensors: Sequence[str],
        *,
        longest: int,
        chunk: int,
        threads: int | None = None,
        shapes: bool = False,
    ) -> None:
        self._model, self._tensors, self._chunk = model, tuple(tensors), chunk
        graph = prepared_graph(model)
        outputs = [_shape_of(graph, name) if shapes else _float_of(graph, name) for name in tensors]
        self._caches = _cut(graph, outputs, model)
        self._outputs = [output.name for output in outputs]
        self._session = session_from_file(
            model.model.path, CPU, model.plugins, threads, graph=proto_from_graph(graph).SerializeToString()
        )
        self._inputs = {node.name for node in self._session.get_inputs()}
        self._memory = self._allocated(longest)

    def run(self, sample: Sample) -> Iterator[Tensors]:
        """The tensors of one sample, chunk by chunk. Raises KilnError for a sample that the model refuses."""
        feed = sample.read()
        if self._model.decoder is None:
            yield self._step(sample, to_model(feed, self._model.permutations))
            return
        ids = feed[TOKENS]
        for start in range(0, len(ids), self._chunk):
            inputs = step_of_chunk(ids, start, min(start + self._chunk, len(ids)), self._model.decoder.kv.block_size)
            yield self._step(sample, {field.name: getattr(inputs, field.name) for field in fields(inputs)})

    def _step(self, sample: Sample, feed: Mapping[str, NDArray]) -> Tensors:
        binding = self._session.io_binding()
        for name, array in feed.items():
            if name in self._inputs:  # the cut graph may not need all of them
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        for cache, memory in zip(self._caches, self._memory, strict=True):
            binding.bind_ortvalue_input(cache.source, memory)
            binding.bind_ortvalue_output(cache.target, memory)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise KilnError(f"the model cannot run {sample.origin}: {ort_message(error)}") from error
        values = binding.get_outputs()[: len(self._outputs)]
        return {name: value.numpy() for name, value in zip(self._tensors, values, strict=True)}

    def _allocated(self, longest: int) -> list[Any]:
        """Cache memory. Its content does not matter: a sample reads only what it wrote itself."""
        import onnxruntime

        decoder = self._model.decoder
        if decoder is None:
            return []
        blocks = -(-longest // decoder.kv.block_size)
        kind = {"float32": 1, "float16": 10, "bfloat16": 16}[decoder.kv.dtype]  # onnx.TensorProto.DataType
        return [
            onnxruntime.OrtValue.ortvalue_from_shape_and_type(decoder.kv.cache_shape(cache.layer, blocks), kind)
            for cache in self._caches
        ]


def _tensor(graph: gs.Graph, name: str) -> gs.Variable:
    made = (tensor for node in graph.nodes for tensor in node.outputs)
    found = next((tensor for tensor in (*graph.inputs, *made) if tensor.name == name), None)
    if found is None:
        raise KilnError(f"the model has no tensor '{name}' in its main graph; check the name")
    return found


def _float_of(graph: gs.Graph, name: str) -> gs.Variable:
    """The tensor itself where it can be an output as it is, else behind a Cast."""
    tensor = _tensor(graph, name)
    if tensor.dtype == np.float32 and not any(tensor is given for given in graph.inputs):
        return tensor
    output = gs.Variable(f"{name}/kiln.observed", np.float32)
    node = gs.Node("Cast", output.name, {"to": onnx.TensorProto.FLOAT}, [tensor], [output], domain="")
    graph.nodes.append(node)
    return output


def _shape_of(graph: gs.Graph, name: str) -> gs.Variable:
    output = gs.Variable(f"{name}/kiln.shape", np.int64)
    graph.nodes.append(gs.Node("Shape", output.name, {}, [_tensor(graph, name)], [output], domain=""))
    return output


def _cut(graph: gs.Graph, outputs: list[gs.Variable], model: CalibrationModel) -> list[_Aliased]:
    """Leave what the outputs need, and the caches that are written on the way, which become outputs too."""
    graph.outputs = list(outputs)
    graph.cleanup(remove_unused_graph_inputs=True)
    if model.decoder is None:
        return []
    given = {tensor.name for tensor in graph.inputs}
    made = {tensor.name: tensor for node in graph.nodes for tensor in node.outputs}
    caches = [
        _Aliased(source, target, layer)
        for layer in range(len(model.decoder.kv.layers))
        for source, target in zip(cache_names(layer), cache_output_names(layer), strict=True)
        if source in given
    ]
    graph.outputs += [made[cache.target] for cache in caches]
    return caches
