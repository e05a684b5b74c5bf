"""One pass of each phase in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

Google, Trace Event Format: complete events ("X") with microseconds. Each phase is a process with two threads: the
runtime's steps with what lies between them, and the operators inside.
"""

import json
from pathlib import Path
from typing import Any

from pipeline.page import write_text
from pipeline.profile.analysis import Phase
from pipeline.profile.playing import Traced
from pipeline.profile.profiling import Profile

_RUNTIME, _OPERATORS = 1, 2


def trace_from_profile(profile: Profile) -> str:
    """The JSON document."""
    events: list[dict[str, Any]] = []
    for number, phase in enumerate(profile.phases, 1):
        events += _phase_events(number, phase, profile.traced[phase.name])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(profile.machine)})


def write_trace(profile: Profile, path: Path) -> None:
    """Raises KilnError where it cannot be written."""
    write_text(trace_from_profile(profile), path, "trace")


def _phase_events(process: int, phase: Phase, traced: Traced) -> list[dict[str, Any]]:
    nodes = {(node.name, node.operator): node for node in phase.operators}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": phase.title}},
        {"ph": "M", "pid": process, "tid": _RUNTIME, "name": "thread_name", "args": {"name": "runtime"}},
        {"ph": "M", "pid": process, "tid": _OPERATORS, "name": "thread_name", "args": {"name": "operators"}},
    ]
    origin = traced.steps[0].start
    before = origin
    for step, run in zip(traced.steps, traced.runs, strict=True):
        if step.start > before:
            events.append(_event(process, _RUNTIME, "host", before - origin, step.start - before, {}))
        sequences = [{"new": sequence.new, "past": sequence.past} for sequence in step.sequences]
        events.append(_event(process, _RUNTIME, "step", step.start - origin, step.seconds, {"sequences": sequences}))
        shift = step.end - origin - (run.start + run.seconds)  # a run is the last thing that a step does
        for call in run.calls:
            node = nodes[call.name, call.operator]
            arguments = {
                "node": call.name,
                "operations": node.work.operations,
                "bytes": node.work.bytes,
                "operations_per_byte": node.work.intensity,
                "least_us": node.best * 1e6,
                "bound_by": node.bound,
                **{name: call.arguments[name] for name in ("kernel",) if name in call.arguments},
            }
            events.append(_event(process, _OPERATORS, call.operator, call.start + shift, call.seconds, arguments))
        before = step.end
    return events


def _event(
    process: int, thread: int, name: str, start: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": "kiln",
        "ts": round(start * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": arguments,
    }
