"""What every experiment gets, a bundle on this machine with its limits, and what it gives back: a table and verdicts.

Also the requests: prompts are random token ids, so nothing is shared by accident, and answers have a given length
(`ignore_eos`, greedy), so every way to serve them does the same work.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import Lane
from pipeline.floors import DecoderWork
from pipeline.limits import Limits

RUNNING = 16
"""Sequences that run at a time, as the issue sets it."""


@dataclass(frozen=True)
class Job:
    """A request of known length."""

    prompt: tuple[int, ...]
    output: int

    def request(self, lane: Lane = "interactive") -> Request:
        return Request(self.prompt, SamplingParams(max_tokens=self.output, ignore_eos=True), lane)


@dataclass(frozen=True)
class Verdict:
    """A claim, what was found, and whether it holds."""

    claim: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Findings:
    """One experiment's outcome. `data` is for the JSON line; `notes` stand below the table."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    verdicts: list[Verdict]
    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """The bundle, this machine, and how thorough to be."""

    bundle: EngineBundle
    threads: int
    repetitions: int
    quick: bool
    seed: int
    vocabulary: int
    work: DecoderWork
    limits: Limits

    def open(self, *, kv_blocks: int | None = None, swap_blocks: int = 0, **config: Any) -> Engine:
        """An engine with these `SchedulerConfig` fields, warm."""
        settings = SchedulerConfig(**{"max_running": RUNNING, **config})
        engine = Engine.open(
            self.bundle.path, config=settings, kv_blocks=kv_blocks, swap_blocks=swap_blocks, threads=self.threads
        )
        engine.generate([Job(self.prompt(np.random.default_rng(0), 300), 4).request()])
        return engine

    def prompt(self, generator: np.random.Generator, tokens: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, self.vocabulary, tokens).tolist())

    def mixed_job(self, generator: np.random.Generator, even: bool = False) -> Job:
        """A prompt of 16 to 1024 tokens, even in the logarithm (or `even` in length), and a lognormal answer.

        The answer's median is 64 tokens, sigma is 1, so that the clips at 8 and 512, a factor of 8 away on either side,
        each catch 2 %.
        """
        length = generator.integers(16, 1025) if even else np.exp(generator.uniform(np.log(16), np.log(1024)))
        output = np.clip(np.exp(generator.normal(np.log(64), 1.0)), 8, 512)
        return Job(self.prompt(generator, round(length)), round(output))

    def prefill_floor(self, tokens: int, known: int = 0) -> float:
        """Least seconds for the first token after `tokens`, the first `known` of which are cached."""
        operations = self.work.prefill_operations(tokens) - (self.work.prefill_operations(known) if known else 0)
        return max(operations / self.limits.product_rate, self.work.weight_bytes / self.limits.read_bandwidth)

    def decode_floor(self, batch: int, context: float) -> float:
        """Least seconds for one token of each of `batch` sequences."""
        return max(
            self.work.decode_operations(batch, context) / self.limits.product_rate,
            self.work.decode_bytes(batch, context) / self.limits.read_bandwidth,
        )


def percentile(values: Any, share: float) -> float:
    """The smallest value that `share` percent of `values` do not exceed: never an interpolated, kinder one."""
    return float(np.percentile(np.asarray(values), share, method="higher"))


def median(values: Any) -> float:
    return float(statistics.median(values))
