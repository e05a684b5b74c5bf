"""What sharing a known prefix saves: requests that all begin with the same 512 tokens."""

import asyncio

import numpy as np

from engines.runtime.engine import Engine
from serving_bench.setting import Findings, Job, Setting, Verdict, median
from serving_bench.trace import follow

SYSTEM = 512
CUT = 0.6
"""Share of the mean first-token time that sharing saves at least."""


def prefixes(setting: Setting) -> Findings:
    """Later requests one by one, and all at once; with and without sharing in turn."""
    later = 6 if setting.quick else 16
    found: dict[tuple[str, bool], list[float]] = {}
    lengths: list[int] = []
    with setting.open(share_prefixes=True) as sharing, setting.open(share_prefixes=False) as alone:
        for repetition in range(setting.repetitions):
            for together in (False, True):
                generator = np.random.default_rng((setting.seed, repetition, together))
                system = setting.prompt(generator, SYSTEM)
                jobs = [
                    Job(system + setting.prompt(generator, int(n)), 4) for n in generator.integers(32, 97, later + 1)
                ]
                lengths += [len(job.prompt) for job in jobs[1:]]
                for engine, shares in ((sharing, True), (alone, False)):
                    way = "all at once" if together else "one by one"
                    found.setdefault((way, shares), []).append(asyncio.run(_first_tokens(engine, jobs, together)))
    return _findings(setting, found, median(lengths), later)


async def _first_tokens(engine: Engine, jobs: list[Job], together: bool) -> float:
    """Mean seconds to the first token of all but the first request, which is done before they come."""
    await follow(engine, [jobs[0].request()])
    if together:
        traces = await follow(engine, [job.request() for job in jobs[1:]])
    else:
        traces = [(await follow(engine, [job.request()]))[0] for job in jobs[1:]]
    return float(np.mean([trace.first_token for trace in traces]))


def _findings(setting: Setting, found: dict[tuple[str, bool], list[float]], length: float, later: int) -> Findings:
    rows, verdicts, data = [], [], {}
    for way in ("one by one", "all at once"):
        on, off = found[way, True], found[way, False]
        cut = median([1 - a / b for a, b in zip(on, off, strict=True)])
        # The mean of requests that all come at once cannot be below half of what their prompts take together.
        share = 1.0 if way == "one by one" else (later + 1) / 2
        floors = [share * setting.prefill_floor(int(length), known) for known in (SYSTEM, 0)]
        rows.append(
            (
                way,
                f"{median(off) * 1e3:.0f}",
                f"{floors[1] / median(off):.0%}",
                f"{median(on) * 1e3:.0f}",
                f"{floors[0] / median(on):.0%}",
                f"{cut:.0%}",
            )
        )
        verdicts.append(Verdict(f"cut by at least {CUT:.0%}, {way}", f"{cut:.0%}", cut >= CUT))
        data[way] = {"on": on, "off": off, "cut": cut, "floor_on": floors[0], "floor_off": floors[1]}
    return Findings(
        "prefixes",
        f"A shared system prompt of {SYSTEM} tokens, then 32 to 96 tokens of each request's own",
        ("later requests come", "first token ms, not shared", "of floor", "shared", "of floor", "cut"),
        rows,
        verdicts,
        data,
        [f"Mean over {later} later requests, median of {setting.repetitions} repetitions with new system prompts."],
    )
