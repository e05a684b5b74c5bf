"""Resident memory over time without pages of files, and how fast it grows.

Pages of files are the weights: those of the embedding become resident as tokens ask for their rows, for hours.

Samples are a second apart and resemble their neighbours, so a line through all of them would seem far surer than it is.
The line goes through the means of twenty stretches of time instead, and its confidence interval comes from these.
"""

import math
import threading
import time
from dataclasses import dataclass

import numpy as np
import psutil

STRETCHES = 20
_T = 2.101  # Student's t, 97.5 %, STRETCHES - 2 degrees of freedom
WARM_UP = 1 / 3
"""Share of the time that is left out: caches, arenas and pools fill."""


@dataclass(frozen=True)
class Growth:
    """MiB an hour, with a 95 % confidence interval, and MiB at the start and the end of the time counted."""

    slope: float
    lowest: float
    highest: float
    first: float
    last: float

    def __str__(self) -> str:
        return (
            f"{self.slope:+.2f} MiB/hour (95 % confidence {self.lowest:+.2f} to {self.highest:+.2f}), "
            f"{self.first:.1f} to {self.last:.1f} MiB"
        )


class MemoryWatch:
    """Samples the anonymous resident memory of a process, with its children, until `stop`."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._samples: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> Growth:
        self._end.set()
        self._thread.join()
        return growth(*np.asarray(self._samples).T)

    def _sample(self) -> None:
        start = time.monotonic()
        while not self._end.wait(1.0):
            self._samples.append((time.monotonic() - start, anonymous_mib(self._process)))


def anonymous_mib(process: psutil.Process) -> float:
    """Resident memory of a process and its children together that is no file's."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            memory = one.memory_info()
        except psutil.NoSuchProcess:
            continue  # ended just now
        total += memory.rss - memory.shared
    return total / 2**20


def growth(seconds: np.ndarray, mib: np.ndarray) -> Growth:
    """Of samples that are evenly spaced in time. Raises SystemExit for fewer than three in a stretch."""
    counted = seconds >= seconds[0] + WARM_UP * (seconds[-1] - seconds[0])
    hours, mib = seconds[counted] / 3600, mib[counted]
    if len(mib) < 3 * STRETCHES:
        raise SystemExit(f"{len(mib)} samples are too few to see growth; expected {3 * STRETCHES}: soak for longer")
    x = np.asarray([part.mean() for part in np.array_split(hours, STRETCHES)])
    y = np.asarray([part.mean() for part in np.array_split(mib, STRETCHES)])
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - slope * x - intercept
    error = math.sqrt((residual**2).sum() / (STRETCHES - 2) / ((x - x.mean()) ** 2).sum())
    return Growth(float(slope), float(slope - _T * error), float(slope + _T * error), float(y[0]), float(y[-1]))
