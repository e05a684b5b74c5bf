"""What a layer takes by itself, as float and with a plan, measured on this machine.

The layer is cut out of its graph with its own weights and run on random activations of the shapes that the workload
gives it; both forms take turns. Layers of one geometry are measured once. Whatever the rewrite puts around a matrix
product, such as quantising its input, is part of the time; fusion with what comes before is not, so a plan looks a
little slower here than it is. A convolution with calibrated ranges takes and gives integers: its neighbours do so too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import TensorProto

from engines.backends.onnxruntime import ALTERNATING, OnnxRuntimeModel
from passes.base import Pass
from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.onnx_model import load_structure
from passes.pattern import only_consumer, producer
from passes.quantization.layers import Layer, name_layers
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.shapes import infer_shapes
from pipeline.paired import Interval, take_turns
from pipeline.quantize.candidates import Rewrites, apply

Shape = tuple[int, ...]
_SECONDS = (0.3, 1.2)
"""Of measuring two forms in turn: usually, and where that does not tell them apart."""


@dataclass(frozen=True)
class Phase:
    """A part of the work: activations of `shape_of` a layer, `calls` times."""

    name: str
    calls: float
    rows: int | None = None
    """Rows of a matrix product's input; None: the shapes that were observed."""


@dataclass(frozen=True)
class Latency:
    """Median seconds of a call in float, and the planned form's time as a multiple of it."""

    float_seconds: float
    ratio: Interval

    @property
    def saved(self) -> float:
        """Seconds; not above 0 where chance may be what saved them."""
        saved = self.float_seconds * (1 - self.ratio.median)
        return saved if self.ratio.decided else min(saved, 0.0)


@dataclass
class LayerClock:
    """Measures layers of one float graph. `shapes`: of every layer's activation in one call of the whole model."""

    reference: Path
    rewrites: Rewrites
    plugins: Sequence[Path]
    phases: Sequence[Phase]
    shapes: Mapping[str, Shape]
    threads: int | None = None
    _measured: dict[tuple[object, ...], Latency] = field(default_factory=dict)

    def saved(self, layer: Layer, plan: LayerPlan) -> float:
        """Seconds that `plan` saves on a layer over the workload; negative where it is slower."""
        return sum(phase.calls * self.latency(layer, plan, phase).saved for phase in self.phases)

    def latency(self, layer: Layer, plan: LayerPlan, phase: Phase) -> Latency:
        shape = self.shapes[layer.name] if phase.rows is None else (phase.rows, layer.depth)
        key = (layer.kind, layer.depth, layer.width, layer.groups, layer.transposed, shape, replace(plan, reason=""))
        if key not in self._measured:
            self._measured[key] = self._measure(layer, plan, shape)
        return self._measured[key]

    def _measure(self, layer: Layer, plan: LayerPlan, shape: Shape) -> Latency:
        with TemporaryDirectory(dir=self.reference.parent, prefix=".kiln-layer-") as folder:
            paths = [Path(folder) / "float.onnx", Path(folder) / "planned.onnx"]
            plans = [PrecisionPlan("", {}), PrecisionPlan("", {layer.name: plan})]
            for path, chosen in zip(paths, plans, strict=True):
                _write_layer(self.reference, layer, shape, path, self.rewrites(chosen))
            models = [
                OnnxRuntimeModel(path, plugins=self.plugins, threads=self.threads, config=ALTERNATING) for path in paths
            ]
            try:
                return _alternate(models, [_random_feed(path, shape) for path in paths])
            finally:
                for model in models:
                    model.close()


def _random_feed(path: Path, shape: Shape) -> dict[str, NDArray]:
    (tensor,) = load_structure(path).graph.input
    generator = np.random.default_rng(0)
    if tensor.type.tensor_type.elem_type == TensorProto.FLOAT:
        return {tensor.name: generator.normal(size=shape).astype(np.float32)}
    return {tensor.name: generator.integers(0, 256, shape, np.uint8)}


def _alternate(models: Sequence[OnnxRuntimeModel], feeds: Sequence[Mapping[str, NDArray]]) -> Latency:
    """`feeds`: of each model."""
    calls = [partial(model.infer, feed) for model, feed in zip(models, feeds, strict=True)]
    return Latency(*take_turns(calls[0], calls[1], *_SECONDS))


def _write_layer(reference: Path, layer: Layer, shape: Shape, target: Path, rewrites: Sequence[Pass]) -> None:
    """One layer as a model of its own, rewritten."""
    whole = graph_from_path(reference)
    name_layers(whole)
    node = next(node for node in whole.nodes if node.name == layer.name)
    node.inputs[0] = gs.Variable(layer.activation, dtype=np.float32, shape=list(shape))
    result = gs.Variable(layer.output, dtype=np.float32)
    nodes, output = [*_makers(node.inputs[1:]), node], result
    node.outputs = [result]
    if layer.kind == "Conv":  # somebody reads its result
        output = gs.Variable(f"{layer.output}_read", dtype=np.float32)
        nodes.append(gs.Node("Identity", inputs=[result], outputs=[output]))
    graph = gs.Graph(
        nodes=nodes,
        inputs=[node.inputs[0]],
        outputs=[output],
        opset=whole.opset,
        import_domains=whole.import_domains,
        ir_version=whole.ir_version,
    )
    for constant in graph.tensors().values():
        if isinstance(constant, gs.Constant):
            constant.values = np.asarray(constant.values)  # beside nobody else's files
    apply(graph, rewrites)
    if layer.kind == "Conv":
        _cut_at_integers(graph, shape)
    infer_shapes(graph)
    target.write_bytes(proto_from_graph(graph).SerializeToString())


def _cut_at_integers(graph: gs.Graph, shape: Shape) -> None:
    """Q of the input and D of the result go: they belong to the ends of a network, not to each layer."""
    first = only_consumer(graph, graph.inputs[0], "QuantizeLinear")
    last = producer(graph.outputs[0].inputs[0].inputs[0], "DequantizeLinear")
    if first is None or last is None:
        return
    entering, leaving = first.outputs[0], last.inputs[0]
    entering.inputs, entering.dtype, entering.shape = [], np.dtype(np.uint8), list(shape)
    leaving.dtype = np.dtype(np.uint8)
    graph.inputs, graph.outputs = [entering], [leaving]
    tidy(graph)


def _makers(tensors: Sequence[gs.Tensor]) -> list[gs.Node]:
    """What a layer's weight is computed by from constants, such as a table that is read the other way round."""
    makers = [maker for tensor in tensors for maker in tensor.inputs]
    return [*(earlier for maker in makers for earlier in _makers(maker.inputs)), *makers]
