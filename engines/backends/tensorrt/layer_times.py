"""Times of an engine's layers, as TensorRT's own profiler reports them.

Not executed on the machines that Kiln is tested on, but over a stand-in for the engine: docs/tensorrt.md says which
command checks it.
"""

from typing import Any

from engines.backends.tensorrt.api import TensorRt


class LayerTimes:
    """Of each run of an engine, the layers in the order in which they were reported, with seconds.

    Given to an `EngineRunner`, it keeps it from capturing: times are taken of what is enqueued.
    """

    def __init__(self) -> None:
        self.runs: list[list[tuple[str, float]]] = []
        self._profiler: Any = None

    def profiler(self, trt: TensorRt) -> Any:
        """The one IProfiler, which lives as long as this: execution contexts keep no reference of their own."""
        if self._profiler is None:
            self._profiler = _profiler(trt, self)
        return self._profiler

    def begin(self) -> None:
        """What is reported from now on is of another run."""
        self.runs.append([])


def _profiler(trt: TensorRt, times: LayerTimes) -> Any:
    """Nothing is raised in it: its calls cross C++."""
    base: Any = trt.IProfiler

    class _Profiler(base):
        def __init__(self) -> None:
            base.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            if times.runs:
                times.runs[-1].append((layer_name, ms / 1e3))

    return _Profiler()
