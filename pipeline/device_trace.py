"""What a CUDA device did while something ran, as CUPTI sees it through torch's profiler: kernels, copies, launches.

ONNX Runtime's and Kiln's kernels are seen as torch's own are, for CUPTI watches the whole process. The record is the
trace that torch exports, in the Trace Event Format. Knows no operators.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import KilnError

_ON_DEVICE = {"kernel": True, "gpu_memcpy": False, "gpu_memset": False}
"""Category to whether it is a kernel."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Span:
    """Nanoseconds of `time.time_ns`."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9

    @property
    def middle(self) -> int:
        return (self.start + self.end) // 2


@dataclass(frozen=True)
class Activity:
    """A kernel, or a copy or filling of memory. `launch` is the call on the host that queued it, where it was seen.

    Kernels of a captured graph have no launch of their own.
    """

    name: str
    span: Span
    is_kernel: bool
    launch: Span | None = None


def record_device(run: Callable[[], object]) -> list[Activity]:
    """What the device did during `run`, by its start; `run` must wait for the end of its work.

    Raises KilnError where torch's profiler sees no device.
    """
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        raise KilnError("torch's profiler sees no CUDA device here, as it has no CUPTI: install torch's CUDA build")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    with tempfile.TemporaryDirectory(prefix="kiln-trace-") as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return activities_from_trace(json.loads(path.read_text()))


def activities_from_trace(trace: dict[str, Any]) -> list[Activity]:
    """The activities of an exported trace, by their start."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: _span(event, base)
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = [
        Activity(
            event["name"], _span(event, base), _ON_DEVICE[event["cat"]], launches.get(event["args"].get("correlation"))
        )
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    return sorted(found, key=lambda activity: activity.span.start)


def _span(event: dict[str, Any], base: int) -> Span:
    start = base + round(event["ts"] * 1000)
    return Span(start, start + round(event["dur"] * 1000))


def exclusive_spans(activities: Iterable[Activity]) -> list[Span]:
    """Of each what lies beyond the end of all before it, so that what overlaps adds up to the time that is busy.

    Kernels overlap where one begins while the one before it ends (programmatic dependent launch). Activities are given
    by their start.
    """
    found: list[Span] = []
    for activity in activities:
        reached = found[-1].end if found else activity.span.start
        start = max(activity.span.start, reached)
        found.append(Span(start, max(activity.span.end, start)))
    return found


def activities_by_window(activities: Sequence[Activity], windows: Sequence[Span]) -> list[list[Activity]]:
    """Those that begin in each of some windows, which lie one after the other. Raises KilnError for an empty window."""
    found = [[one for one in activities if window.start <= one.span.start < window.end] for window in windows]
    empty = sum(not part for part in found)
    if empty:
        raise KilnError(
            f"torch's profiler saw nothing of {empty} of {len(windows)} steps, but {len(activities)} activities: "
            "its clock and the host's disagree, or its buffers were full; profile again, with fewer --tokens"
        )
    return found
