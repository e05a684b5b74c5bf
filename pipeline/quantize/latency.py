"""What a layer takes by itself, as float and with a plan, measured on this machine.

The layer is cut out of its graph with its own weights and run on random activations of the shapes that the workload
gives it; both forms take turns. Layers of one geometry are measured once. Whatever the rewrite puts around the product,
such as quantising its input, is part of the time; fusion with what comes before is not, so a plan looks a little slower
here than it is.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_graphsurgeon as gs

from engines.backends.onnxruntime import ALTERNATING, OnnxRuntimeModel
from passes.base import Pass
from passes.graph import graph_from_path, proto_from_graph
from passes.quantization.layers import Layer, name_layers
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.shapes import infer_shapes
from pipeline.quantize.candidates import Rewrites, apply

Shape = tuple[int, ...]
_SECONDS = 0.15
_LEAST_RUNS = 5


@dataclass(frozen=True)
class Phase:
    """A part of the work: activations of `shape_of` a layer, `calls` times."""

    name: str
    calls: float
    rows: int | None = None
    """Rows of a matrix product's input; None: the shapes that were observed."""


@dataclass(frozen=True)
class Latency:
    """Median seconds of one call, float and planned, and the relative spread of either."""

    float_seconds: float
    planned_seconds: float
    spread: float

    @property
    def saved(self) -> float:
        """Seconds; 0 where the difference is within the spread."""
        saved = self.float_seconds - self.planned_seconds
        return saved if abs(saved) > self.spread * self.float_seconds else min(saved, 0.0)


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
            values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            try:
                return _alternate(models, {layer.activation: values})
            finally:
                for model in models:
                    model.close()


def _alternate(models: Sequence[OnnxRuntimeModel], feeds: Mapping[str, np.ndarray]) -> Latency:
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        model.infer(feeds)
    end = time.perf_counter() + _SECONDS * len(models)
    while len(times[-1]) < _LEAST_RUNS or time.perf_counter() < end:
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model.infer(feeds)
            taken.append(time.perf_counter() - start)
    quartiles = [statistics.quantiles(taken, n=4) for taken in times]
    (low, middle, _), (planned_low, planned, _) = quartiles
    return Latency(middle, planned, max((middle - low) / middle, (planned - planned_low) / planned))


def _write_layer(reference: Path, layer: Layer, shape: Shape, target: Path, rewrites: Sequence[Pass]) -> None:
    """One layer as a model of its own, rewritten."""
    whole = graph_from_path(reference)
    name_layers(whole)
    node = next(node for node in whole.nodes if node.name == layer.name)
    node.inputs[0] = gs.Variable(layer.activation, dtype=np.float32, shape=list(shape))
    result = gs.Variable(layer.output, dtype=np.float32)
    node.outputs = [result]
    graph = gs.Graph(
        nodes=[*_makers(node.inputs[1:]), node],
        inputs=[node.inputs[0]],
        outputs=[result],
        opset=whole.opset,
        import_domains=whole.import_domains,
        ir_version=whole.ir_version,
    )
    for constant in graph.tensors().values():
        if isinstance(constant, gs.Constant):
            constant.values = np.asarray(constant.values)  # beside nobody else's files
    apply(graph, rewrites)
    infer_shapes(graph)
    target.write_bytes(proto_from_graph(graph).SerializeToString())


def _makers(tensors: Sequence[gs.Tensor]) -> list[gs.Node]:
    """What a layer's weight is computed by from constants, such as a table that is read the other way round."""
    makers = [maker for tensor in tensors for maker in tensor.inputs]
    return [*(earlier for maker in makers for earlier in _makers(maker.inputs)), *makers]
