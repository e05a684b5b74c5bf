"""Passes of all phases on an opened bundle, and the work of each node: what profiles on every kind of machine share."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.operator_work import CallWork, call_work
from pipeline.profile.graph_facts import GraphFacts
from pipeline.profile.ort_events import Run, runs_from_profile
from pipeline.profile.recording import Pass, Step
from pipeline.profile.workloads import Kind, Session
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import OP_TYPE

UNPACKED = {"session.disable_prepacking": "1"}
REPLAYS = 8
"""Of a pass under a device's profiler, of which the fastest quarter counts."""


@dataclass(frozen=True)
class Traced:
    """A pass with the profiler: its steps by the process's clock, and what ran in each."""

    steps: tuple[Step, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Measured:
    """By the phase's name: passes without a profiler, passes with one, and the work of a pass by node index.

    `works` is None where the work of what was timed is not known. `device` has the seconds of a pass on a device by its
    own clock, without a profiler, where that was measured.
    """

    plain: Mapping[str, Sequence[Pass]]
    traced: Mapping[str, Sequence[Traced]]
    works: Mapping[str, Mapping[int, CallWork]] | None
    device: Mapping[str, float] = field(default_factory=dict)


def played(
    kinds: Sequence[Kind], session: Session, backend: Any, progress: Progress, what: str
) -> tuple[dict[str, list[Pass]], list[Step]]:
    """Passes by phase, and all steps, of requests through the runtime; the backend stays open."""
    recorder = session.watch(backend)
    passes = {}
    with session.engine(recorder) as engine:
        for kind in kinds:
            with progress.stage(f"{what}: {kind.title}"):
                passes[kind.name] = kind.play(engine, recorder)
    return passes, recorder.steps


def middle(passes: Sequence[Pass]) -> Pass:
    """The one that is run again for what needs no statistics."""
    return passes[len(passes) // 2]


def replayed(session: Session, backend: Any, kind: Kind, step: Step) -> Step:
    """A recorded step again, to its end: with the times of this one."""
    start = time.perf_counter()
    session.replay(backend, kind, step)
    return replace(step, start=start, end=time.perf_counter())


def profiled_runs(session: Session, backend: Any, steps: int) -> list[Run]:
    """One for each of so many steps, from a backend that was opened with the profiler; closes it."""
    runs = runs_from_profile(backend.end_profile())
    backend.close()
    if len(runs) != session.at_opening + steps:
        raise KilnError(
            f"ONNX Runtime's profile has {len(runs)} runs, but {session.at_opening + steps} were made; it keeps about "
            "a million events: profile fewer --tokens"
        )
    return runs[session.at_opening :]


def works_of_phases(
    kinds: Sequence[Kind], session: Session, file: Path, plain: Mapping[str, Sequence[Pass]]
) -> dict[str, dict[int, CallWork]]:
    """Work by node index of the middle pass of each phase, from running it once more.

    Weights are left as they are stored for it, because packed ones have no shape.
    """
    backend = session.open(file, UNPACKED)
    steps = {kind.name: middle(plain[kind.name]).steps for kind in kinds}
    for kind in kinds:
        for step in steps[kind.name]:
            session.replay(backend, kind, step)
    runs = iter(profiled_runs(session, backend, sum(map(len, steps.values()))))
    pairs = {name: [(step, next(runs)) for step in of_phase] for name, of_phase in steps.items()}
    return {name: _work_of_pass(of_phase, session.facts) for name, of_phase in pairs.items()}


def _work_of_pass(steps: Sequence[tuple[Step, Run]], facts: GraphFacts) -> dict[int, CallWork]:
    total: dict[int, CallWork] = {}
    for step, run in steps:
        windows = iter(facts.windows)
        for call in run.calls:
            window = next(windows) if call.operator == OP_TYPE else None
            work = call_work(call.arguments, step.sequences, window, facts.low_bit.get(call.name))
            total[call.index] = _sum(total[call.index], work) if call.index in total else work
    return total


def _sum(first: CallWork, second: CallWork) -> CallWork:
    return CallWork(
        first.operations + second.operations,
        first.arithmetic,
        max(first.rows, second.rows),
        first.weights + second.weights,
        first.cache + second.cache,
        first.activations + second.activations,
    )
