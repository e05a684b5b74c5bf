"""A bundle on a CUDA device, where ONNX Runtime's profile has only what the host does: opened three times.

1. As it is served, captured steps and all: for the times of passes as a caller sees them; and, on the same backend, for
   what a pass takes on the device by its own clock, and for its activities there under torch's profiler.
2. Without captured steps, under both profilers: for the node of each kernel (`pipeline.profile.attribution`).
3. With weights left as they are stored: for the work of each node.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.backends.cuda_launching import LaunchingCudaDecoder
from pipeline.device_limits import queued_seconds
from pipeline.device_trace import Activity, Span, activities_by_window, record_device
from pipeline.operator_work import NO_WORK
from pipeline.profile.attribution import OUTSIDE, Owner, owners_of_steps, run_of_step
from pipeline.profile.playing import (
    REPLAYS,
    Measured,
    Traced,
    middle,
    played,
    profiled_runs,
    replayed,
    works_of_phases,
)
from pipeline.profile.recording import Pass, Step, launch_again
from pipeline.profile.workloads import Kind, Session
from pipeline.progress import Progress

_PAUSE = 1e-3
"""Seconds between two steps, so that the device's activities of one are told from those of the next by their time."""
_MARGIN = 400_000
"""Nanoseconds around a step that are still its own."""

Record = Callable[[Callable[[], object]], list[Activity]]
Clock = Callable[[int, Callable[[], object], Callable[[], object]], float]


@dataclass(frozen=True)
class _StepOnDevice:
    step: Step
    activities: list[Activity]


def measure_on_device(
    kinds: Sequence[Kind],
    session: Session,
    folder: Path,
    progress: Progress,
    record: Record = record_device,
    clock: Clock = queued_seconds,
) -> Measured:
    """All of it; profiles are written into `folder`.

    `record` gives what the device did while something ran, `clock` what it takes for what is queued to a stream.

    Raises KilnError where kernels cannot be given to nodes.
    """
    record(lambda: None)  # starts CUPTI before anything is captured, which takes some seconds the first time
    with progress.stage("run: open"):
        backend = session.open(None, None)
    plain, _ = played(kinds, session, backend, progress, "run")
    again = {kind.name: middle(plain[kind.name]) for kind in kinds}
    device = {}
    if isinstance(backend, LaunchingCudaDecoder):
        with progress.stage("time steps on the device"):
            device = {name: _device_seconds(backend, one, clock) for name, one in again.items()}
    with progress.stage("run with the device's profiler"):
        timed = {kind.name: _replayed_pass(session, backend, kind, again[kind.name], REPLAYS, record) for kind in kinds}
    backend.close()
    with progress.stage("find the node of each kernel"):
        owners = _owners(kinds, session, folder / "nodes", again, record)
    with progress.stage("count operations and bytes"):
        works = works_of_phases(kinds, session, folder / "work", plain)
    return Measured(
        plain,
        {name: [_traced(steps, owners[name]) for steps in passes] for name, passes in timed.items()},
        {name: {**of_nodes, OUTSIDE: NO_WORK} for name, of_nodes in works.items()},
        device,
    )


def _device_seconds(backend: LaunchingCudaDecoder, one: Pass, clock: Clock) -> float:
    """Of a pass without a profiler, when its steps wait for the device and never the device for them."""
    passes = [
        sum(clock(backend.stream, partial(launch_again, backend, step), backend.collect) for step in one.steps)
        for _ in range(REPLAYS)
    ]
    return statistics.median(passes)


def _replayed_pass(
    session: Session, backend: Any, kind: Kind, one: Pass, times: int, record: Record
) -> list[list[_StepOnDevice]]:
    """A pass again, so many times after one that warms up, step by step, and what the device did in each."""
    for step in one.steps:
        session.replay(backend, kind, step)
    steps: list[Step] = []
    windows: list[Span] = []

    def run() -> None:
        for _ in range(times):
            for step in one.steps:
                time.sleep(_PAUSE)
                begun = time.time_ns()
                steps.append(replayed(session, backend, kind, step))
                windows.append(Span(begun - _MARGIN, time.time_ns() + _MARGIN))
        time.sleep(_PAUSE)

    activities = activities_by_window(record(run), windows)
    every = list(map(_StepOnDevice, steps, activities))
    return [every[first : first + len(one.steps)] for first in range(0, len(every), len(one.steps))]


def _owners(
    kinds: Sequence[Kind], session: Session, file: Path, passes: dict[str, Pass], record: Record
) -> dict[str, list[list[Owner]]]:
    """By phase, for each step of its pass, the nodes of its activities in their order."""
    backend = session.open(file, None)
    origin = backend.profile_start
    found = {kind.name: _replayed_pass(session, backend, kind, passes[kind.name], 1, record)[0] for kind in kinds}
    runs = iter(profiled_runs(session, backend, 2 * sum(len(one.steps) for one in passes.values())))
    pairs: list[tuple[list[Activity], Any]] = []
    for kind in kinds:
        count = len(found[kind.name])
        of_phase = [next(runs) for _ in range(2 * count)][count:]  # the first half warmed up
        pairs += [(step.activities, run) for step, run in zip(found[kind.name], of_phase, strict=True)]
    owners = iter(owners_of_steps([activities for activities, _ in pairs], [run for _, run in pairs], origin))
    return {kind.name: [next(owners) for _ in found[kind.name]] for kind in kinds}


def _traced(steps: Sequence[_StepOnDevice], owners: Sequence[Sequence[Owner]]) -> Traced:
    origin = steps[0].activities[0].span.start
    return Traced(
        tuple(one.step for one in steps),
        tuple(run_of_step(one.activities, own, origin) for one, own in zip(steps, owners, strict=True)),
    )
