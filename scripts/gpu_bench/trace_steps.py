"""What a trace's time goes to: its steps by what is in them, and how long the host waited for the device in each.

A kind of step whose waiting is next to nothing is limited by the host, any other by the device. Knows no kernels.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np

from engines.backends.base import LaunchingBackend

_BOUNDS = (32, 64, 128, 192, 256)
"""Batch sizes up to which decode steps are counted together."""


@dataclass(frozen=True)
class TracedStep:
    """Seconds of `time.perf_counter` at which its launch and its collection began and ended."""

    tokens: int
    sequences: int
    context: int
    """Tokens before this step's, of all sequences."""
    launch: tuple[float, float]
    collect: tuple[float, float]

    @property
    def kind(self) -> str:
        if self.tokens > self.sequences:
            return "prompts"
        most = next((bound for bound in _BOUNDS if self.sequences <= bound), self.sequences)
        return f"decode, up to {most:3}"


@contextmanager
def traced_steps(backend: LaunchingBackend) -> Iterator[list[TracedStep]]:
    """The steps that are collected meanwhile, in order."""
    steps: list[TracedStep] = []
    launched: deque[tuple[int, int, int, tuple[float, float]]] = deque()
    launch, collect = backend.launch, backend.collect

    def timed_launch(inputs: Any, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        launch(inputs, *arguments, **options)
        context = int(np.sum(inputs.past_seqlens))
        launched.append((len(inputs.input_ids), len(inputs.past_seqlens), context, (start, time.perf_counter())))

    def timed_collect() -> Any:
        start = time.perf_counter()
        result = collect()
        steps.append(TracedStep(*launched.popleft(), (start, time.perf_counter())))
        return result

    with patch.object(backend, "launch", timed_launch), patch.object(backend, "collect", timed_collect):
        yield steps


def step_table(steps: Sequence[TracedStep]) -> str:
    """For people: by kind, seconds between the ends of steps, and what the host did in them."""
    columns = ("steps", "tokens", "context", "s", "ms", "launch", "wait")
    lines = [f"{'steps of the trace':20}" + "".join(f"{name:>9}" for name in columns)]
    groups: dict[str, list[tuple[TracedStep, float]]] = {}
    for before, step in pairwise(steps):
        groups.setdefault(step.kind, []).append((step, step.collect[1] - before.collect[1]))
    for kind, members in sorted(groups.items()):
        count, taken = len(members), sum(seconds for _, seconds in members)
        launching = sum(step.launch[1] - step.launch[0] for step, _ in members)
        waiting = sum(step.collect[1] - step.collect[0] for step, _ in members)
        tokens = sum(step.tokens for step, _ in members) / count
        context = sum(step.context / step.sequences for step, _ in members) / count
        each = "".join(f"{value / count * 1e3:9.2f}" for value in (taken, launching, waiting))
        lines.append(f"{kind:20}{count:9}{tokens:9.0f}{context:9.0f}{taken:9.3f}{each}")
    return "\n".join(lines)
