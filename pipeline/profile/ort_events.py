"""ONNX Runtime's profile as records: for each run, when each kernel started and how long it took.

Reads a file that a session wrote; knows nothing of what the kernels do.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import KilnError

_SUFFIX = "_kernel_time"
_LOST = 0.5e-6
"""Seconds: durations are cut to whole microseconds, which loses half of one on average."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel. `start` counts seconds from the session's own beginning; `arguments` are the profile's."""

    index: int
    name: str
    operator: str
    start: float
    seconds: float
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of the whole graph."""

    start: float
    seconds: float
    calls: tuple[KernelCall, ...]

    @property
    def in_operators(self) -> float:
        """Seconds that its kernels took together; they run one after the other."""
        return sum(call.seconds for call in self.calls)


def runs_from_profile(path: Path) -> list[Run]:
    """The runs that a profile holds, in order. Raises KilnError for a file that is not one."""
    try:
        events = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KilnError(f"{path} is no profile of ONNX Runtime: {error}; check the disk, and profile again") from error
    runs = sorted((event for event in events if event["name"] == "model_run"), key=_start)
    kernels = sorted((event for event in events if event["name"].endswith(_SUFFIX)), key=_start)
    found, place = [], 0
    for run in runs:
        start, calls = _start(run), []
        while place < len(kernels) and _start(kernels[place]) < start + run["dur"]:
            if _start(kernels[place]) >= start:
                calls.append(_call(kernels[place]))
            place += 1
        found.append(Run(start / 1e6, run["dur"] / 1e6, tuple(calls)))
    return found


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _call(event: dict[str, Any]) -> KernelCall:
    arguments = event["args"]
    return KernelCall(
        index=int(arguments["node_index"]),
        name=event["name"].removesuffix(_SUFFIX),
        operator=arguments["op_name"],
        start=_start(event) / 1e6,
        seconds=event["dur"] / 1e6 + _LOST,
        arguments=arguments,
    )
