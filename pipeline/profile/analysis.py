"""From what was recorded to what it means: each operator's place on the roofline, and what limits a phase.

An operator is bound by what takes longer at best, its operations or its bytes; or by launching it, where both take less
than any call of an operator does. A phase is bound by what most of its time goes to; the rest of it is the host's
(scheduling, packing, choosing tokens) and the dispatch of operators, which counts as launching. On a device, operators
are its kernels, dispatch is what it takes for its steps beyond them, and the host's is the rest.
Where the work of what was timed is not known, as in layers of TensorRT, it is bound by the device: no more can be said.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pipeline.operator_work import NO_WORK, CallWork
from pipeline.profile.ort_events import Run
from pipeline.profile.recording import Pass
from pipeline.profile.roofline import Roofline

Bound = Literal["compute", "bandwidth", "launch", "device", "host"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
_LEAST_CALL = 2e-6
"""Seconds that a call takes at least, where a phase has no operators without work to tell."""


@dataclass(frozen=True)
class OperatorTime:
    """One node of the graph: mean seconds of a pass, its work, and the least seconds that the work takes."""

    name: str
    operator: str
    seconds: float
    work: CallWork
    best: float
    bound: Bound


@dataclass(frozen=True)
class Phase:
    """One kind of pass, by the fastest quarter of all. Operators were timed with the profiler, all else without it.

    tokens      tokens, or samples, that one pass handles
    seconds     of a pass as its caller sees it
    host        of it outside the backend; outside a device's steps
    dispatch    of it in the backend, or a device's steps, but in no operator
    """

    name: str
    title: str
    tokens: int
    seconds: float
    host: float
    dispatch: float
    operators: tuple[OperatorTime, ...]
    passes: int
    streamed: bool
    slowdown: float
    """Seconds in the backend with the profiler, by those without it; on a device at least 1."""

    @property
    def in_operators(self) -> float:
        return sum(operator.seconds for operator in self.operators)

    @property
    def accounted(self) -> float:
        """Seconds of all parts, from which predictions start; more than a pass where profiled ones were disturbed."""
        return self.host + self.dispatch + self.in_operators

    @property
    def coverage(self) -> float:
        """Seconds in operators, measured with the profiler, by the seconds of a pass, measured without it."""
        return self.in_operators / self.seconds

    @property
    def parts(self) -> dict[Bound, float]:
        """Seconds by what bounds them."""
        sums = {
            bound: sum(operator.seconds for operator in self.operators if operator.bound == bound) for bound in BOUNDS
        }
        return {**sums, "launch": sums["launch"] + self.dispatch, "host": self.host}

    @property
    def verdict(self) -> Bound:
        parts = self.parts
        return max(BOUNDS, key=lambda bound: parts[bound])

    @property
    def best(self) -> float:
        """Least seconds of all operators, one after the other."""
        return sum(operator.best for operator in self.operators)


@dataclass(frozen=True)
class OperatorRow:
    """All nodes of one operator."""

    operator: str
    calls: int
    seconds: float
    operations: float
    bytes: int
    best: float
    bound: Bound

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes if self.bytes else 0.0


def phase_from_passes(
    name: str,
    title: str,
    tokens: int,
    plain: Sequence[Pass],
    profiled: Sequence[Sequence[Run]],
    works: Mapping[int, CallWork] | None,
    roofline: Roofline | None,
    device: float | None = None,
) -> Phase:
    """`plain` passes ran without the profiler; `profiled` has the runs of each with it, `works` go by node index.

    Without `works` and `roofline` operators have times only. `device` are the seconds that a pass takes on a device,
    where operators run on one: on the host, steps may overlap.
    """
    fastest = _fastest(plain, lambda one: one.seconds)
    seconds = statistics.mean(one.seconds for one in fastest)
    chosen = _fastest(profiled, lambda runs: sum(run.seconds for run in runs))
    in_backend = statistics.mean(one.in_backend for one in fastest) if device is None else min(device, seconds)
    times: dict[int, float] = {}
    names: dict[int, tuple[str, str]] = {}
    for call in (call for runs in chosen for run in runs for call in run.calls):
        times[call.index] = times.get(call.index, 0.0) + call.seconds / len(chosen)
        names[call.index] = (call.name, call.operator)
    if works is None or roofline is None:
        streamed = False
        operators = [OperatorTime(*names[index], times[index], NO_WORK, 0.0, "device") for index in names]
    else:
        streamed = sum(work.weights + work.cache for work in works.values()) > roofline.cached
        idle = [times[index] for index in times if not works[index].bytes]
        least = roofline.call or (statistics.median(idle) if idle else _LEAST_CALL)
        operators = []
        for index, (node, operator) in names.items():
            work = works[index]
            bound, best = bound_of(work, roofline, least, streamed), roofline.best(work, streamed)
            operators.append(OperatorTime(node, operator, times[index], work, best, bound))
    total = sum(times.values())
    return Phase(
        name,
        title,
        tokens,
        seconds,
        host=max(seconds - in_backend, 0.0),
        dispatch=max(in_backend - total, 0.0),
        operators=tuple(operators),
        passes=len(plain),
        streamed=streamed,
        slowdown=seconds_of_runs(profiled) / in_backend if device is None else max(total / in_backend, 1.0),
    )


def seconds_of_runs(passes: Sequence[Sequence[Run]]) -> float:
    """Of a pass with the profiler, from the beginnings of its runs to their ends."""
    chosen = _fastest(passes, lambda runs: sum(run.seconds for run in runs))
    return statistics.mean(sum(run.seconds for run in runs) for runs in chosen)


def _fastest(passes: Sequence[Any], seconds: Callable[[Any], float]) -> list[Any]:
    """The fastest quarter: what others do on the machine only ever makes a pass slower.

    Means over whole passes, not medians of nodes, so that the nodes' times add up to the passes'.
    """
    return sorted(passes, key=seconds)[: max(len(passes) // 4, 1)]


def bound_of(work: CallWork, roofline: Roofline, least: float, streamed: bool) -> Bound:
    """What limits an operator at best; `least` are the seconds that a call takes with nothing to do."""
    computing, moving = roofline.computing(work), roofline.moving(work, streamed)
    if max(computing, moving) < least:
        return "launch"
    return "compute" if computing >= moving else "bandwidth"


def rows_from_phase(phase: Phase) -> list[OperatorRow]:
    """By operator, the one that takes longest first; what bounds one is what bounds most of its time."""
    groups: dict[str, list[OperatorTime]] = {}
    for operator in phase.operators:
        groups.setdefault(operator.operator, []).append(operator)
    rows = []
    for name, nodes in groups.items():
        share = {bound: sum(node.seconds for node in nodes if node.bound == bound) for bound in BOUNDS}
        rows.append(
            OperatorRow(
                name,
                len(nodes),
                sum(node.seconds for node in nodes),
                sum(node.work.operations for node in nodes),
                sum(node.work.bytes for node in nodes),
                sum(node.best for node in nodes),
                max(BOUNDS, key=lambda bound: share[bound]),
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def seconds_if(phase: Phase, roofline: Roofline, change: "Change") -> float:
    """Seconds of a pass if work changed so: operators keep their distance from the roof, all else stays."""
    total = phase.host + phase.dispatch
    for node in phase.operators:
        best = roofline.best(change.of(node.work), phase.streamed)
        total += node.seconds if node.bound == "launch" or not node.best else node.seconds * best / node.best
    return total


@dataclass(frozen=True)
class Change:
    """Of work: `constants` multiplies the bytes of weights and of keys and values, `batch` all that grows with it."""

    constants: float = 1.0
    batch: int = 1

    def of(self, work: CallWork) -> CallWork:
        return replace(
            work,
            operations=work.operations * self.batch,
            rows=work.rows * self.batch,
            weights=round(work.weights * self.constants),
            cache=round(work.cache * self.constants * self.batch),
            activations=work.activations * self.batch,
        )


HALF_THE_BYTES = Change(constants=0.5)
TWICE_THE_BATCH = Change(batch=2)
