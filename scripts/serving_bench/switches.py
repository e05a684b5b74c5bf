"""What single switches of the scheduler bring: speculation by prompt lookup, overlap of two steps, and swapping."""

import asyncio
import time

import numpy as np

from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.sequence import blocks_for
from serving_bench.setting import RUNNING, Findings, Job, Setting, median
from serving_bench.trace import Trace, follow

DRAFT = 8
"""Tokens that speculation proposes at most."""
ANSWER = 128
SWAPPED_PROMPT, SWAPPED_ANSWER = 192, 320
"""Tokens of requests that outgrow the cache, which has room for their prompts and two thirds of what they become."""
PASSAGE = (
    "The lighthouse keeper wrote the wind, the height of the tide and the names of passing ships into a grey ledger "
    "every evening. In the winter of 1911 the entries became shorter: the wind, the tide, no ships. "
)


def switches(setting: Setting) -> Findings:
    rows: list[tuple[str, ...]] = []
    data = {}
    for streams in (1, 4):
        for kind in ("copying text", "random prompt"):
            found, same, accepted = _speculation(setting, kind, streams)
            name = f"speculation, {kind}, {streams} at a time"
            rows.append(_row(name, found, f"{accepted:.0%} of drafts accepted, {same} of {streams} answers the same"))
            data[name] = {**found, "accepted": accepted, "same": same}
    found = _overlap(setting)
    rows.append(_row(f"overlap, {RUNNING} at a time", found, ""))
    data["overlap"] = found
    found, preempted = _swapping(setting)
    name = f"swapping, {RUNNING} at a time in a cache for two thirds of them"
    remark = " and ".join(f"{count:.0f} preempted {name}" for name, count in preempted.items())
    rows.append(_row(name, found, remark))
    data["swapping"] = {**found, "preempted": preempted}
    return Findings(
        "switches",
        "Single switches, on against off",
        ("switch", "tokens/s off", "on", "on over off", "remark"),
        rows,
        [],
        data,
    )


def _row(name: str, found: dict[str, list[float]], remark: str) -> tuple[str, ...]:
    off, on = found["off"], found["on"]
    ratio = median([a / b for a, b in zip(on, off, strict=True)])
    return (name, f"{median(off):.1f}", f"{median(on):.1f}", f"{ratio:.2f}", remark)


def _speculation(setting: Setting, kind: str, streams: int) -> tuple[dict[str, list[float]], int, float]:
    found: dict[str, list[float]] = {"off": [], "on": []}
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    with setting.open(speculate=0) as plain, setting.open(speculate=DRAFT) as drafting:
        for repetition in range(setting.repetitions):
            generator = np.random.default_rng((setting.seed, repetition))
            if kind == "copying text":
                ask = f"Copy this text twice, word by word.\n\n{PASSAGE}\n\n{PASSAGE}\n\n"
                requests = [Request(f"{number}. {ask}", sampling) for number in range(streams)]
            else:
                requests = [Request(setting.prompt(generator, 200), sampling) for _ in range(streams)]
            traces = {name: _traces(engine, requests) for name, engine in (("off", plain), ("on", drafting))}
            for name, run in traces.items():
                found[name].append(_decode_rate(run))
        same = sum(a.tokens == b.tokens for a, b in zip(traces["off"], traces["on"], strict=True))
        drafted, accepted = (_counted(drafting, name) for name in ("drafted_tokens", "accepted_tokens"))
    return found, same, accepted / max(drafted, 1)


def _overlap(setting: Setting) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"off": [], "on": []}
    with setting.open(overlap=False) as plain, setting.open(overlap=True) as overlapping:
        for repetition in range(setting.repetitions):
            generator = np.random.default_rng((setting.seed, repetition))
            requests = [Job(setting.prompt(generator, 64), ANSWER).request() for _ in range(RUNNING)]
            for name, engine in (("off", plain), ("on", overlapping)):
                found[name].append(_decode_rate(_traces(engine, requests)))
    return found


def _swapping(setting: Setting) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens/s over all, because repeating a prompt or bringing it back is what differs; and preemptions by run."""
    found: dict[str, list[float]] = {"off": [], "on": []}
    decoder = setting.bundle.manifest.decoder
    assert decoder is not None
    blocks = RUNNING * blocks_for(SWAPPED_PROMPT + SWAPPED_ANSWER, decoder.kv.block_size) * 2 // 3
    with setting.open(kv_blocks=blocks) as plain, setting.open(kv_blocks=blocks, swap_blocks=blocks) as swapping:
        engines = {"off": plain, "on": swapping}
        for repetition in range(setting.repetitions):
            generator = np.random.default_rng((setting.seed, repetition))
            prompts = [setting.prompt(generator, SWAPPED_PROMPT) for _ in range(RUNNING)]
            requests = [Job(prompt, SWAPPED_ANSWER).request() for prompt in prompts]
            for name, engine in engines.items():
                start = time.perf_counter()
                traces = _traces(engine, requests)
                found[name].append(sum(len(trace.times) for trace in traces) / (time.perf_counter() - start))
        preempted = {name: _counted(engine, "preemptions") / setting.repetitions for name, engine in engines.items()}
    return found, preempted


def _traces(engine: Engine, requests: list[Request]) -> list[Trace]:
    return asyncio.run(follow(engine, requests))


def _decode_rate(traces: list[Trace]) -> float:
    """Tokens/s after the last first token, so that prompts do not count."""
    start = max(trace.times[0] for trace in traces)
    count = sum(time > start for trace in traces for time in trace.times)
    return count / (max(trace.times[-1] for trace in traces) - start)


def _counted(engine: Engine, name: str) -> float:
    counter = f"kiln_{name}_total"
    samples = (sample for family in engine.metrics.families() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == counter)
