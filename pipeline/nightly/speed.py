"""The speed gate: is the candidate slower than `stable`, beyond what this machine's noise explains?

Both engines are open in one process and take turns; of each pair the order is drawn, so that neither drift nor the
cache's state favours a side. A pair gives one ratio of times, candidate to stable. A candidate fails where even the
lower end of the median's interval is beyond the limit; where only the median is, more pairs are measured, and what they
leave undecided passes, with a note.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from engines.backends.onnxruntime import ALTERNATING, OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.opening import check_plugins, default_kv_blocks
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.nightly.config import SpeedOptions
from pipeline.paired import Interval, interval_of
from pipeline.progress import Progress

Call = Callable[[], object]


def judge_speed(
    stable: Path, candidate: Path, options: SpeedOptions, threads: int | None, progress: Progress
) -> dict[str, Any]:
    """The verdict. Raises KilnError as opening engines does."""
    bundles = [open_bundle(path) for path in (stable, candidate)]
    with progress.stage("open both"):
        engines = [_opened(bundle, threads) for bundle in bundles]
    with closing(engines[0]), closing(engines[1]):
        calls = [_call(engine, bundle, options) for engine, bundle in zip(engines, bundles, strict=True)]
        for call in calls:
            call()
        counts = [_calls_in(call, options.seconds) for call in calls]
        with progress.stage("take turns") as told:
            interval = measure(lambda side: _seconds(calls[side], counts[side]), options, lambda n: told(f"{n} pairs"))
    return verdict(interval, options)


def measure(seconds: Callable[[int], float], options: SpeedOptions, told: Callable[[int], None]) -> Interval:
    """`seconds` times one call of stable (0) or the candidate (1)."""
    generator = np.random.default_rng(0)
    ratios: list[float] = []
    wanted = options.pairs
    while True:
        while len(ratios) < wanted:
            first = int(generator.integers(2))
            times = {side: seconds(side) for side in (first, 1 - first)}
            ratios.append(times[1] / times[0])
            told(len(ratios))
        interval = interval_of(ratios, options.confidence)
        decided = interval.median <= 1 + options.limit or interval.lowest > 1 + options.limit
        if decided or wanted >= options.most_pairs:
            return interval
        wanted = min(2 * wanted, options.most_pairs)


def verdict(interval: Interval, options: SpeedOptions) -> dict[str, Any]:
    limit = 1 + options.limit
    passed = interval.lowest <= limit
    told = (
        f"{interval.median:.3f} times stable's time, {options.confidence:.0%} interval {interval.lowest:.3f} to "
        f"{interval.highest:.3f} over {interval.pairs} pairs, limit {limit:.3f}"
    )
    if not passed:
        text = f"slower: {told}"
    elif interval.median > limit:
        text = f"perhaps slower, not shown: {told}"
    else:
        text = told
    figures = {"ratio": interval.median, "lowest": interval.lowest, "highest": interval.highest, "limit": limit}
    return {"passed": passed, "text": text, "figures": figures}


def _opened(bundle: EngineBundle, threads: int | None) -> Engine:
    """Threads rest between calls: two engines take turns."""
    check_plugins(bundle)
    manifest = bundle.manifest
    provider, plugins = manifest.backend.provider, bundle.plugin_paths
    if manifest.decoder is None:
        model = OnnxRuntimeModel(
            bundle.engine_path, provider=provider, plugins=plugins, threads=threads, config=ALTERNATING
        )
        return Engine.from_model(model, EngineInfo(manifest.name, "model"))
    scheduling = SchedulerConfig(max_running=1, share_prefixes=False)
    backend = OnnxRuntimeDecoder(
        bundle.engine_path,
        manifest.decoder.kv,
        default_kv_blocks(manifest.decoder, 1),
        provider=provider,
        plugins=plugins,
        threads=threads,
        config=ALTERNATING,
    )
    return Engine.from_decoder(backend, manifest.decoder, config=scheduling, info=EngineInfo(manifest.name, "decoder"))


def _call(engine: Engine, bundle: EngineBundle, options: SpeedOptions) -> Call:
    """One request of a decoder, or one batch."""
    decoder = bundle.manifest.decoder
    if decoder is None:
        specs = input_specs_from_graph(bundle.engine_path, bundle.manifest.inputs)
        feeds = sample_of_batch(specs, options.batch, seed=0)
        return lambda: engine.infer(feeds)
    tokens = min(options.tokens, max(1, engine.max_length // 2))
    length = max(1, min(options.prompt, engine.max_length - tokens))
    prompt = tuple(np.random.default_rng(0).integers(0, decoder.vocab_size, length).tolist())
    request = Request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return lambda: engine.generate([request])


def _seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _calls_in(call: Call, seconds: float) -> int:
    """Calls that take about so long."""
    return max(1, math.ceil(seconds / max(_seconds(call, 1), 1e-6)))
