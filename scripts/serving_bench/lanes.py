"""Whether interactive requests stay quick while batch requests take all that is left."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.runtime.engine import Engine
from serving_bench.interference import STEP_LIMIT
from serving_bench.setting import RUNNING, Findings, Job, Setting, Verdict, median, percentile
from serving_bench.trace import Reader

PROMPT, ANSWER = 512, 16
LIMIT = 2.0
"""Times that the P99 first-token time may rise."""
THINK = 0.5
"""Mean seconds, exponential, between an answer and the next interactive request."""
BACKLOG = 8 * RUNNING
"""Batch requests that are always there: with more than `ageing` of work before them, those that wait age."""


@dataclass
class Load:
    """Keeps `BACKLOG` batch requests outstanding until stopped."""

    setting: Setting
    engine: Engine
    generator: np.random.Generator

    def __post_init__(self) -> None:
        self.tokens = 0
        self._stopping = False
        self._readers: dict[Reader, None] = {}  # in the order of arrival
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(BACKLOG)]

    async def saturated(self) -> None:
        """Return when every place was taken once."""
        for reader in list(self._readers)[:RUNNING]:
            await reader.reached(1)

    async def stop(self) -> None:
        self._stopping = True
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._tasks)

    def tokens_so_far(self) -> int:
        return self.tokens + sum(len(reader.trace.times) for reader in self._readers)

    async def _keep_one(self) -> None:
        while not self._stopping:
            reader = Reader(self.engine, self.setting.mixed_job(self.generator).request("batch"))
            self._readers[reader] = None
            trace = await reader.done()
            del self._readers[reader]
            self.tokens += len(trace.times)


def lanes(setting: Setting) -> Findings:
    ways: dict[str, dict[str, Any]] = {"as it is by default": {}}
    if not setting.quick:
        ways |= {f"tokens_per_step {size}": {STEP_LIMIT: None, "tokens_per_step": size} for size in (128, 512)}
    requests = 12 if setting.quick else 40
    floor = setting.prefill_floor(PROMPT)
    rows, verdicts, data = [], [], {}
    for name, config in ways.items():
        idle: list[float] = []
        loaded: list[float] = []
        rates = []
        with setting.open(share_prefixes=False, **config) as engine:
            for repetition in range(setting.repetitions):
                generator = np.random.default_rng((setting.seed, repetition))
                idle += asyncio.run(_interactive(setting, engine, generator, requests))
                times, rate = asyncio.run(_under_load(setting, engine, generator, requests))
                loaded += times
                rates.append(rate)
        ratio = percentile(loaded, 99) / percentile(idle, 99)
        rows.append(
            (
                name,
                f"{median(idle) * 1e3:.0f}",
                f"{percentile(idle, 99) * 1e3:.0f}",
                f"{floor / median(idle):.0%}",
                f"{median(loaded) * 1e3:.0f}",
                f"{percentile(loaded, 99) * 1e3:.0f}",
                f"{ratio:.2f}",
                f"{median(rates):.0f}",
            )
        )
        data[name] = {"config": config, "idle": idle, "loaded": loaded, "ratio": ratio, "batch_rate": rates}
        if not config:
            claim = f"P99 first token at most {LIMIT:g} times that of an idle server, by default"
            verdicts.append(Verdict(claim, f"{ratio:.2f}", ratio <= LIMIT))
    return Findings(
        "lanes",
        f"Interactive requests of {PROMPT} tokens under a saturating batch load",
        ("", "idle P50 ms", "idle P99", "of floor", "loaded P50", "loaded P99", "times", "batch tokens/s"),
        rows,
        verdicts,
        data,
        [
            f"First-token times; P99 over all {requests * setting.repetitions} requests of each kind, one interactive "
            f"request at a time, {THINK} s apart in the mean; {BACKLOG} batch requests are always there.",
        ],
    )


async def _interactive(setting: Setting, engine: Engine, generator: np.random.Generator, count: int) -> list[float]:
    """First-token times of requests that come one after another."""
    times = []
    for _ in range(count):
        reader = Reader(engine, Job(setting.prompt(generator, PROMPT), ANSWER).request())
        times.append((await reader.done()).first_token)
        await asyncio.sleep(generator.exponential(THINK))
    return times


async def _under_load(
    setting: Setting, engine: Engine, generator: np.random.Generator, count: int
) -> tuple[list[float], float]:
    """The same beside a batch load, and the load's tokens/s meanwhile."""
    load = Load(setting, engine, np.random.default_rng(setting.seed))
    await asyncio.sleep(0)  # its requests are submitted
    await load.saturated()
    start, before = time.perf_counter(), load.tokens_so_far()
    times = await _interactive(setting, engine, generator, count)
    rate = (load.tokens_so_far() - before) / (time.perf_counter() - start)
    await load.stop()
    return times, rate
