"""One variant measured in a process of its own, so that its peak of memory is its own.

Without a KV cache every token computes the whole sequence before it again; without batching one request runs at a time.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.bundle import open_bundle
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from pipeline.ablate.variants import AblateConfig
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.limits import peak_memory
from plugins.errors import KilnError

_STEP = 512


@dataclass(frozen=True)
class Measured:
    """One value for each repetition: tokens (or samples) a second, and mean seconds of a request. Bytes at the peak."""

    rates: tuple[float, ...]
    latencies: tuple[float, ...]
    peak: float | None

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def latency(self) -> float:
        return statistics.median(self.latencies)


def measure(bundle: Path, on: frozenset[str], config: AblateConfig) -> Measured:
    """Raises KilnError where the process fails, also where the system ends it for lack of memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measured, bundle, on, config).result()
        except BrokenProcessPool as error:
            raise KilnError(
                f"the process that measured {bundle} ended without a result; it may have been out of memory"
            ) from error


def _measured(bundle: Path, on: frozenset[str], config: AblateConfig) -> Measured:
    opened = open_bundle(bundle)
    batch = config.requests if "batching" in on else 1
    if opened.manifest.decoder is not None:
        scheduling = SchedulerConfig(batch, max(_STEP, batch), step_stretch=None, share_prefixes=False)
        with Engine.open(bundle, config=scheduling, threads=config.threads) as engine:
            prompts, output = _prompts(engine, config), config.output
            if "kv" in on:
                results = _repeated(lambda: _cached(engine, prompts, output), config)
            else:
                results = _repeated(lambda: _recomputed(engine, prompts, output, batch), config)
            return _result(results, config.requests * config.output)
    with Engine.open(bundle, batching=BatchingConfig(max_batch=batch), threads=config.threads) as engine:
        specs = input_specs_from_graph(opened.engine_path, opened.manifest.inputs)
        feeds = sample_of_batch(specs, batch, config.seed)
        found = next((value.shape[0] for value in feeds.values() if value.ndim), 1)

        def calls() -> list[float]:
            return [_seconds(lambda: engine.infer(feeds)) for _ in range(-(-config.requests // found))]

        results = _repeated(calls, config)
        return _result(results, -(-config.requests // found) * found)


def _repeated(play: Callable[[], list[float]], config: AblateConfig) -> list[tuple[float, list[float]]]:
    """Seconds in all, and of each request, of every repetition; one before them warms up."""
    play()
    results = []
    for _ in range(config.repetitions):
        start = time.perf_counter()
        latencies = play()
        results.append((time.perf_counter() - start, latencies))
    return results


def _result(results: list[tuple[float, list[float]]], units: int) -> Measured:
    return Measured(
        tuple(units / seconds for seconds, _ in results),
        tuple(statistics.mean(latencies) for _, latencies in results),
        peak_memory(),
    )


def _prompts(engine: Engine, config: AblateConfig) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(config.seed)
    length = min(config.prompt, engine.max_length - config.output)
    if length < 1:
        raise KilnError(f"the context of {engine.max_length} tokens has no room for {config.output}; lower --output")
    return [tuple(generator.integers(0, engine.info.vocab_size, length).tolist()) for _ in range(config.requests)]


def _cached(engine: Engine, prompts: list[tuple[int, ...]], output: int) -> list[float]:
    """Seconds of each request, from when all were sent."""
    start = time.perf_counter()
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    ends: list[float] = []
    for stream in [engine.submit(Request(prompt, sampling)) for prompt in prompts]:
        stream.result()
        ends.append(time.perf_counter() - start)
    return ends


def _recomputed(engine: Engine, prompts: list[tuple[int, ...]], output: int, together: int) -> list[float]:
    """The same where every token is the first of a new, longer prompt; requests that run together go in step."""
    start = time.perf_counter()
    ends: list[float] = []
    for first in range(0, len(prompts), together):
        texts = list(prompts[first : first + together])
        for _ in range(output):
            answers = engine.generate(texts, SamplingParams(max_tokens=1, ignore_eos=True))
            texts = [(*text, *answer.token_ids) for text, answer in zip(texts, answers, strict=True)]
        ends += [time.perf_counter() - start] * len(texts)
    return ends


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
