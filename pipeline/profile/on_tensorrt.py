"""A bundle with a TensorRT plan, opened twice: as it is served, for the times of passes; and with TensorRT's own
profiler, for the times of layers.

Nothing is captured while layers are timed. What a layer does is not known beyond what `layers.json` says of it, which
is its kind, its types and the ONNX nodes that it computes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.backends.tensorrt.child import LAYERS
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.layers import EngineLayer, layers_from_file
from pipeline.profile.ort_events import KernelCall, Run
from pipeline.profile.playing import REPLAYS, Measured, Traced, middle, played, replayed
from pipeline.profile.recording import Pass
from pipeline.profile.workloads import Kind, Session
from pipeline.progress import Progress
from plugins.errors import KilnError

UNKNOWN = "(layer)"
"""Kind of a layer that `layers.json` does not list."""


def layers_of_bundle(folder: Path) -> dict[str, EngineLayer]:
    """By name, what the builder said of the engine's layers; nothing where its log lists none."""
    path = folder / LAYERS
    return {layer.name: layer for layer in layers_from_file(path)} if path.is_file() else {}


def measure_on_tensorrt(
    kinds: Sequence[Kind], session: Session, layers: Mapping[str, EngineLayer], progress: Progress
) -> Measured:
    """All of it. Raises KilnError where TensorRT reports no layers."""
    with progress.stage("run: open"):
        backend = session.open(None, None)
    plain, _ = played(kinds, session, backend, progress, "run")
    backend.close()
    times = LayerTimes()
    with progress.stage("time the layers: open"):
        backend = session.open(times, None)
    traced = {}
    with progress.stage("time the layers"):
        for kind in kinds:
            one = middle(plain[kind.name])
            for step in one.steps:
                session.replay(backend, kind, step)
            traced[kind.name] = [_timed(kind, session, backend, one, times, layers) for _ in range(REPLAYS)]
    backend.close()
    return Measured(plain, traced, None)


def _timed(
    kind: Kind, session: Session, backend: Any, one: Pass, times: LayerTimes, layers: Mapping[str, EngineLayer]
) -> Traced:
    steps, runs = [], []
    for step in one.steps:
        first = len(times.runs)
        steps.append(replayed(session, backend, kind, step))
        runs.append(run_of_layers([layer for run in times.runs[first:] for layer in run], layers))
    return Traced(tuple(steps), tuple(runs))


def run_of_layers(timed: Sequence[tuple[str, float]], layers: Mapping[str, EngineLayer]) -> Run:
    """A step's layers one after the other: names with seconds, as TensorRT reports them, by the numbers of their names.

    A step of a linear cache may run the engine more than once, so that a layer comes again. Raises KilnError for none.
    """
    if not timed:
        raise KilnError("TensorRT reported no layers of a step; report it with the bundle's build.log")
    numbers: dict[str, int] = {}
    calls, start = [], 0.0
    for name, seconds in timed:
        layer = layers.get(name)
        kind = layer.kind if layer is not None else UNKNOWN
        calls.append(KernelCall(numbers.setdefault(name, len(numbers)), name, kind, start, seconds, {}))
        start += seconds
    return Run(0.0, start, tuple(calls))
