"""Where a step's time goes on the device: its kernels, longest first, as CUPTI sees them through torch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.device_trace import record_device

MOST = 14
"""Kernels that a table names."""


@dataclass(frozen=True)
class Kernel:
    """`microseconds` of all its `calls`, in one run."""

    name: str
    microseconds: float
    calls: float


def kernels_of(run: Callable[[], object], runs: int) -> tuple[list[Kernel], float]:
    """Kernels of one of `runs` calls, longest first, and microseconds that a call takes while nobody looks.

    `run` must have finished its work on the device when it returns.
    """
    run()
    start = time.perf_counter()
    for _ in range(runs):
        run()
    taken = (time.perf_counter() - start) / runs * 1e6
    activities = record_device(lambda: [run() for _ in range(runs)])
    calls = Counter(activity.name for activity in activities)
    spent: Counter[str] = Counter()
    for activity in activities:
        spent[activity.name] += activity.span.end - activity.span.start
    return [Kernel(name, whole / 1e3 / runs, calls[name] / runs) for name, whole in spent.most_common()], taken


def kernel_table(title: str, kernels: list[Kernel], taken: float) -> str:
    """For people: the longest ones, the others together, and what is left of the time."""
    rows = [(kernel.microseconds, kernel.calls, _short(kernel.name)) for kernel in kernels[:MOST]]
    if rest := kernels[MOST:]:
        rows.append((sum(k.microseconds for k in rest), sum(k.calls for k in rest), f"{len(rest)} others"))
    total = sum(kernel.microseconds for kernel in kernels)
    lines = [f"{title}: {taken:.0f} us, of which kernels {total:.0f}"]
    return "\n".join([*lines, *(f"{time:10.1f} us {calls:6.0f} x  {name}" for time, calls, name in rows)])


def _short(name: str) -> str:
    """Without template arguments and parameters that fill a screen."""
    return re.sub(r"\s+", " ", re.sub(r"^void ", "", name))[:100]
