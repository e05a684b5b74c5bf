"""What a prompt of 4000 tokens does to eight answers that are being streamed."""

import asyncio
from typing import Any

import numpy as np

from engines.runtime.engine import Engine
from serving_bench.setting import RUNNING, Findings, Job, Setting, Verdict, median, percentile
from serving_bench.trace import Reader

STREAMS, LONG = 8, 4000
LIMIT = 3.0
"""Times that the inter-token P99 may rise."""
WARM, QUIET = 16, 120
"""Tokens of every stream before measuring starts, and tokens of each in the quiet part."""
STREAM_TOKENS = 3000
STEP_LIMIT = "step_stretch"
"""The scheduler's own limit on a step's time; None switches it off."""


def ways(setting: Setting) -> dict[str, dict[str, Any]]:
    """Name to configuration. Fixed piece sizes are measured without the limit on a step's time."""
    sizes = (24, 512) if setting.quick else (16, 24, 32, 64, 128, 256, 512)
    found: dict[str, dict[str, Any]] = {"as it is by default": {}}
    if not setting.quick:
        found |= {f"a step at most {stretch:g} times longer": {STEP_LIMIT: stretch} for stretch in (2.0, 3.0)}
    for size in sizes:
        # Eight tokens of a step are the streams' own.
        found[f"pieces of {size}"] = {STEP_LIMIT: None, "tokens_per_step": size + STREAMS}
    found["in one piece"] = {STEP_LIMIT: None, "tokens_per_step": LONG + RUNNING}
    return found


def interference(setting: Setting) -> Findings:
    rows, data = [], {}
    verdicts = []
    floor = setting.decode_floor(STREAMS, 64 + WARM + QUIET / 2)
    least = setting.prefill_floor(LONG)
    for name, config in ways(setting).items():
        before, during, first, ratios = [], [], [], []
        with setting.open(share_prefixes=False, **config) as engine:
            for repetition in range(setting.repetitions):
                quiet, disturbed, seconds = asyncio.run(_run(setting, engine, repetition))
                before.append(percentile(quiet, 99))
                during.append(percentile(disturbed, 99))
                ratios.append(during[-1] / before[-1])
                first.append(seconds)
        ratio = median(ratios)
        rows.append(
            (
                name,
                f"{median(before) * 1e3:.0f}",
                f"{floor / median(before):.0%}",
                f"{median(during) * 1e3:.0f}",
                f"{ratio:.1f}",
                f"{median(first):.1f}",
                f"{least / median(first):.0%}",
            )
        )
        data[name] = {"config": config, "before": before, "during": during, "ratio": ratio, "first_token": first}
        if not config:
            verdicts.append(Verdict(f"P99 rises at most {LIMIT:g} times, by default", f"{ratio:.2f}", ratio <= LIMIT))
    return Findings(
        "interference",
        f"A prompt of {LONG} tokens arrives among {STREAMS} streams",
        ("prompt is computed", "P99 ms before", "of floor", "during", "times", "its first token s", "of floor"),
        rows,
        verdicts,
        data,
        ["P99 of the times between two tokens of the streams, before the prompt comes and until its first token."],
    )


async def _run(setting: Setting, engine: Engine, repetition: int) -> tuple[list[float], list[float], float]:
    """Gaps of the streams before and during, and the long prompt's first-token time."""
    generator = np.random.default_rng((setting.seed, repetition))
    streams = [Reader(engine, Job(setting.prompt(generator, 64), STREAM_TOKENS).request()) for _ in range(STREAMS)]
    for stream in streams:
        await stream.reached(WARM)
    start = max(stream.trace.times[-1] for stream in streams)
    count = max(len(stream.trace.times) for stream in streams)
    for stream in streams:
        await stream.reached(count + QUIET)
    long = Reader(engine, Job(setting.prompt(generator, LONG), 2).request())
    trace = await long.done()
    quiet = [gap for stream in streams for gap in stream.trace.gaps_within(start, trace.arrival)]
    # A gap in which the prompt arrives belongs to the second part only: it may hold a piece of the prompt.
    disturbed = [gap for stream in streams for gap in stream.trace.gaps_within(trace.arrival, trace.times[0])]
    for stream in streams:
        stream.cancel()
    for stream in streams:
        await stream.done()
    return quiet[:-STREAMS] if len(quiet) > 2 * STREAMS else quiet, disturbed, trace.first_token
