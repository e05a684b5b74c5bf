"""Which node of the graph each kernel on a device belongs to.

A kernel belongs to the node in whose time on the host its launch lies. ONNX Runtime gives the nodes' times, in whole
microseconds, and CUPTI the launches', by the same clock of the system; what is left between the two is taken out by
shifting one against the other, as little as is needed, until the launches lie inside nodes.

Captured steps have no launches: they run the kernels of the same step without capture, in the same order, and take its
nodes by position. Names are compared, so that a difference is an error and not a wrong table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.device_trace import Activity, Span, exclusive_spans
from pipeline.profile.ort_events import KernelCall, Run
from plugins.errors import KilnError

COPIES = "(copies)"
"""What stands for an operator where memory was copied or filled by no node: a step's inputs and results."""
OUTSIDE = -1
"""Its index."""
_SHIFTS = np.arange(-100_000, 100_001, 250)
"""Nanoseconds that are tried; the clocks were never seen to be more than one microsecond apart."""
_LEAST_INSIDE = 0.97
"""Share of the launches that must lie inside a node."""


@dataclass(frozen=True)
class Owner:
    """The node that an activity of a step belongs to; `activity` is its name."""

    activity: str
    index: int
    node: str
    operator: str


def owners_of_steps(steps: Sequence[Sequence[Activity]], runs: Sequence[Run], origin: int) -> list[list[Owner]]:
    """For each step, of what its activities are, in their order; `origin` is when the runs' clock began.

    Raises KilnError where the two clocks do not fit, and for a kernel that no node launched.
    """
    nodes = [[(_span(call, origin), call) for call in run.calls] for run in runs]
    windows = [span for step in nodes for span, _ in step]
    launches = [one.launch for step in steps for one in step if one.is_kernel and one.launch is not None]
    shift = clock_shift(launches, windows)
    return [[_owner(activity, own, shift) for activity in step] for step, own in zip(steps, nodes, strict=True)]


def clock_shift(launches: Sequence[Span], nodes: Sequence[Span]) -> int:
    """Nanoseconds to add to the launches' times: as little as puts 97 % of them inside a node, and there the best.

    Raises KilnError where nothing does.
    """
    if not launches or not nodes:
        raise KilnError(f"{len(launches)} launches of kernels and {len(nodes)} nodes were seen; profile again")
    ordered = sorted(nodes, key=lambda node: node.start)
    starts, ends = (np.array([getattr(node, name) for node in ordered]) for name in ("start", "end"))
    begins, stops = (np.array([getattr(launch, name) for launch in launches]) for name in ("start", "end"))
    inside = []
    for shift in _SHIFTS:
        places = np.searchsorted(starts, begins + shift, side="right") - 1
        inside.append(int(((places >= 0) & (stops + shift <= ends[places])).sum()))
    enough = np.flatnonzero(np.array(inside) >= _LEAST_INSIDE * len(launches))
    if not len(enough):
        raise KilnError(
            f"only {max(inside)} of {len(launches)} kernels were launched while a node ran by ONNX Runtime's profile; "
            "the clocks of the two profilers disagree: keep the machine free of other work and profile again"
        )
    ranges = np.split(enough, np.flatnonzero(np.diff(enough) > 1) + 1)
    nearest = min(ranges, key=lambda places: np.abs(_SHIFTS[places]).min())
    most = max(inside[place] for place in nearest)
    best = [place for place in nearest if inside[place] == most]
    return int(_SHIFTS[best[len(best) // 2]])


def _owner(activity: Activity, nodes: Sequence[tuple[Span, KernelCall]], shift: int) -> Owner:
    """The innermost node around the middle of the launch."""
    if activity.launch is not None:
        middle = activity.launch.middle + shift
        around = [(span, call) for span, call in nodes if span.start <= middle < span.end]
        if around:
            _, call = max(around, key=lambda one: one[0].start)
            return Owner(activity.name, call.index, call.name, call.operator)
    if activity.is_kernel:
        where = "was launched outside of every node" if activity.launch else "has no launch in torch's profile"
        raise KilnError(f"the kernel {activity.name[:100]} {where}, so that its time belongs to none; profile again")
    return Owner(activity.name, OUTSIDE, "inputs and results", COPIES)


def _span(call: KernelCall, origin: int) -> Span:
    start = origin + round(call.start * 1e9)
    return Span(start, start + round(call.seconds * 1e9))


def run_of_step(activities: Sequence[Activity], owners: Sequence[Owner], origin: int) -> Run:
    """A step's activities as a run: one call for each, in seconds since `origin`, with the time beyond those before.

    The run takes what its calls do, and the pauses between its first kernel and its last: around the copies of a step's
    inputs and results the device waits for the host.

    Raises KilnError where they are not those of the step that the owners are of.
    """
    names = [activity.name for activity in activities]
    expected = [owner.activity for owner in owners]
    if names != expected:
        pairs = enumerate(zip(names, expected, strict=False))
        place = next((place for place, (name, other) in pairs if name != other), min(len(names), len(expected)))
        found, wanted = (part[place][:100] if place < len(part) else "nothing more" for part in (names, expected))
        raise KilnError(
            f"a step ran {len(names)} kernels and copies where the same step, node by node, ran {len(expected)}; the "
            f"first that differs is number {place}: {found} instead of {wanted}. Kernels are chosen anew in each "
            "session: profile again"
        )
    spans = exclusive_spans(activities)
    calls = tuple(
        KernelCall(owner.index, owner.node, owner.operator, (own.start - origin) / 1e9, own.seconds, {"kernel": name})
        for name, owner, own in zip(names, owners, spans, strict=True)
    )
    whole = sum(own.end - own.start for own in spans) + _waiting(activities, spans)
    return Run((spans[-1].end - whole - origin) / 1e9, whole / 1e9, calls)


def _waiting(activities: Sequence[Activity], spans: Sequence[Span]) -> int:
    """Nanoseconds from a step's first kernel to its last in which nothing runs."""
    kernels = [own for activity, own in zip(activities, spans, strict=True) if activity.is_kernel]
    inside = [own for own in spans if kernels and kernels[0].start <= own.start <= kernels[-1].start]
    return sum(after.start - before.end for before, after in pairwise(inside))
