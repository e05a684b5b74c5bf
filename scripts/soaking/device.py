"""A GPU under a soak: its memory, none of which is left for a while, and an engine that is opened again and again.

Each round opens the engine, takes all free device memory away now and then while requests come, then leaves it alone
for the rest, and closes it. Requests may fail for lack of memory in the first part and in no other. Rounds without
drafted tokens, whose steps are queued ahead, alternate with rounds that have them.
"""

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from plugins.cuda_runtime import CudaRuntime, OutOfDeviceMemoryError
from soaking.in_process import EngineSoak, settled
from soaking.outcomes import Outcomes

ROUND_SECONDS = 60.0
SHORT = 1 / 3
"""Share of a round in which memory is taken away."""
MOST_GROWTH = 8.0
"""MiB by which device memory in use may differ between rounds: the driver's own pools are that coarse."""
_LEFT = 4 << 20
_TOKENS_PER_STEP = 2048
_LONGEST = 1500
"""Tokens of prompts, so that steps need more memory now and then than any before."""


@dataclass(frozen=True)
class DeviceSoak:
    """MiB in use at the end of every round, with the engine open and closed; what else went wrong."""

    opened: list[float]
    closed: list[float]
    away: int
    preemptions: int
    shortages: int

    @property
    def growth(self) -> float:
        """MiB, the larger of two, both without the first round, which loads what stays loaded.

        Closed, what the last round has more than the first counted. Open, what the later half has more than the
        earlier, by medians: each engine keeps as much as the largest step needed that it met, which is chance.
        """
        opened, closed = (values[1:] or values for values in (self.opened, self.closed))
        half = max(1, len(opened) // 2)
        return max(closed[-1] - closed[0], median(opened[-half:]) - median(opened[:half]))


def soak_device_memory(
    bundle: Path, outcomes: Outcomes, seconds: float, seed: int, kv_blocks: int | None
) -> DeviceSoak:
    """At least two rounds."""
    runtime = CudaRuntime()
    rounds = max(2, round(seconds / ROUND_SECONDS))
    opened, closed, away, preemptions = [], [], 0, 0
    for number in range(rounds):
        soak = EngineSoak(
            bundle,
            outcomes,
            seed + number,
            kv_blocks,
            tokens_per_step=_TOKENS_PER_STEP,
            speculate=3 * (number % 2),
            longest=_LONGEST,
        )
        with soak.engine:
            soak.shortages = True
            with Squeeze(runtime, seed + number):
                soak.run(seconds / rounds * SHORT)
            soak.shortages = False
            soak.run(seconds / rounds * (1 - SHORT))
            away += settled(lambda soak=soak: soak.blocks_away)
            preemptions += soak.preemptions
            opened.append(used_mib(runtime))
        closed.append(used_mib(runtime))
        print(
            f"round {number + 1} of {rounds}: {sum(outcomes.ended.values())} requests, device memory in use "
            f"{opened[-1]:.1f} MiB open, {closed[-1]:.1f} MiB closed",
            flush=True,
        )
    short = sum(count for (_, outcome), count in outcomes.ended.items() if outcome == "no memory")
    return DeviceSoak(opened, closed, away, preemptions, short)


def used_mib(runtime: CudaRuntime) -> float:
    """Of the whole device, whoever uses it."""
    runtime.enter()
    free, total = runtime.memory()
    return (total - free) / 2**20


class Squeeze:
    """Takes all free memory of a device for moments, until it is left."""

    def __init__(self, runtime: CudaRuntime, seed: int) -> None:
        self._runtime, self._random = runtime, random.Random(seed)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Squeeze":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        self._runtime.enter()
        while not self._end.is_set():
            taken = self._take()
            self._end.wait(self._random.uniform(0.2, 2.0))
            for address in taken:
                self._runtime.free(address)
            self._end.wait(self._random.uniform(0.1, 1.0))

    def _take(self) -> list[int]:
        """Addresses of as few pieces as are to be had."""
        taken, size = [], self._runtime.memory()[0]
        while size > _LEFT:
            try:
                taken.append(self._runtime.allocate(size, "the soak"))
            except OutOfDeviceMemoryError:
                size //= 2
        return taken
