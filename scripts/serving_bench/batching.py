"""Continuous against static batching: 64 requests at once, at most 16 run."""

import asyncio
from collections.abc import Callable

import numpy as np

from engines.runtime.engine import Engine
from serving_bench.setting import RUNNING, Findings, Job, Setting, Verdict, median, percentile
from serving_bench.static_batching import StaticBatcher
from serving_bench.trace import Trace, all_gaps, follow, seconds_of, tokens_of

FASTER = 1.5
"""Output tokens/s, continuous over static, at least."""
EQUAL = 1.02
"""How much a P99 may exceed another and still count as no worse: what two runs of the same differ by."""
CONTINUOUS = "continuous"
STRETCH = 1.35
SMOOTH = f"continuous, step_stretch {STRETCH}"
"""Steps with pieces of prompts take hardly longer than the others. The claims are judged with this one setting."""
BATCH_LANE = "continuous, in the batch lane"
"""Where pieces of prompts may make a step as long as they like."""
GROUPS = "static: the same engine, fed in groups"
KIND = "static: finished ones leave"
FULL = "static: finished ones go on computing"
PADDED = "static: as before, and prompts padded"
JUDGED = (FULL, PADDED)
"""What is called static batching: a batch waits for its longest answer. The other two are there to see what each part
of the difference comes from; no scheduler can be 1.5 times as fast as the kind one, which only lacks company."""


def batching(setting: Setting) -> Findings:
    """Every way in turn, so that a busy minute hits all alike; padding, far slower than the rest, once."""
    found: dict[str, dict[str, list[float]]] = {}
    answers: dict[str, list[list[int]]] = {}
    with (
        setting.open(share_prefixes=False) as engine,
        setting.open(share_prefixes=False, step_stretch=STRETCH) as smooth,
    ):
        for repetition in range(setting.repetitions):
            jobs = jobs_of(setting)
            for name, run in _ways(engine, smooth, repetition == 0).items():
                traces = run(jobs)
                assert [len(trace.tokens) for trace in traces] == [job.output for job in jobs]
                answers[name] = [trace.tokens for trace in traces]
                row = found.setdefault(name, {"rate": [], "p50": [], "p99": [], "longest": [], "first": []})
                gaps = all_gaps(traces)
                row["rate"].append(tokens_of(traces) / seconds_of(traces))
                row["p50"].append(percentile(gaps, 50))
                row["p99"].append(percentile(gaps, 99))
                row["longest"].append(max(gaps))
                row["first"].append(float(np.mean([trace.first_token for trace in traces])))
    return _findings(setting, jobs, found, answers)


def jobs_of(setting: Setting) -> list[Job]:
    generator = np.random.default_rng(setting.seed)
    return [setting.mixed_job(generator) for _ in range(32 if setting.quick else 64)]


def _ways(engine: Engine, smooth: Engine, all_of_them: bool) -> dict[str, Callable[[list[Job]], list[Trace]]]:
    ways = {
        CONTINUOUS: lambda jobs: asyncio.run(follow(engine, [job.request() for job in jobs])),
        SMOOTH: lambda jobs: asyncio.run(follow(smooth, [job.request() for job in jobs])),
        BATCH_LANE: lambda jobs: asyncio.run(follow(engine, [job.request("batch") for job in jobs])),
        GROUPS: lambda jobs: asyncio.run(_grouped(engine, jobs)),
        KIND: lambda jobs: StaticBatcher(keep_finished=False).run(engine.backend, jobs, RUNNING),
        FULL: lambda jobs: StaticBatcher(keep_finished=True).run(engine.backend, jobs, RUNNING),
    }
    if all_of_them:
        ways[PADDED] = lambda jobs: StaticBatcher(True, pad_prompts=True).run(engine.backend, jobs, RUNNING)
    return ways


async def _grouped(engine: Engine, jobs: list[Job]) -> list[Trace]:
    traces: list[Trace] = []
    for first in range(0, len(jobs), RUNNING):
        traces += await follow(engine, [job.request() for job in jobs[first : first + RUNNING]])
    for trace in traces:
        trace.arrival = traces[0].arrival  # the later groups were there too, and waited
    return traces


def floor_seconds(setting: Setting, jobs: list[Job]) -> tuple[float, float]:
    """The least that prompts and answers can take: each prompt by itself, answers always `RUNNING` at a time."""
    prompts = sum(setting.prefill_floor(len(job.prompt)) for job in jobs)
    tokens = sum(job.output - 1 for job in jobs)
    context = sum((len(job.prompt) + job.output / 2) * job.output for job in jobs) / sum(job.output for job in jobs)
    return prompts, tokens / RUNNING * setting.decode_floor(RUNNING, context)


def _findings(
    setting: Setting, jobs: list[Job], found: dict[str, dict[str, list[float]]], answers: dict[str, list[list[int]]]
) -> Findings:
    prompts, decoding = floor_seconds(setting, jobs)
    output = sum(job.output for job in jobs)
    floor = output / (prompts + decoding)
    fast = found[CONTINUOUS]
    rows, verdicts, ratios = [], [], {}
    for name, row in found.items():
        ratios[name] = median([a / b for a, b in zip(fast["rate"], row["rate"], strict=False)])
        rows.append(
            (
                name,
                f"{median(row['rate']):.1f}",
                f"{median(row['rate']) / floor:.0%}",
                "" if name == CONTINUOUS else f"{ratios[name]:.2f}",
                *(f"{median(row[figure]) * 1e3:.0f}" for figure in ("p50", "p99", "longest")),
                f"{median(row['first']):.1f}",
            )
        )
    for name in JUDGED:
        faster = median([a / b for a, b in zip(found[SMOOTH]["rate"], found[name]["rate"], strict=False)])
        p99, other = (median(found[way]["p99"]) for way in (SMOOTH, name))
        verdicts += [
            Verdict(f"at least {FASTER} times the tokens/s of {name}", f"{faster:.2f}", faster >= FASTER),
            Verdict(
                f"P99 between tokens no worse than {name}",
                f"{p99 * 1e3:.0f} against {other * 1e3:.0f} ms",
                p99 <= EQUAL * other,
            ),
        ]
    ceiling = output / (prompts + decoding) / median(found[KIND]["rate"])
    same = sum(a == b for a, b in zip(answers[CONTINUOUS], answers[KIND], strict=True))
    tokens = sum(len(job.prompt) for job in jobs)
    return Findings(
        "batching",
        f"Continuous and static batching: {len(jobs)} requests at once, at most {RUNNING} run",
        ("way", "tokens/s", "of floor", "continuous is faster by", "P50 ms", "P99 ms", "longest ms", "first token s"),
        rows,
        verdicts,
        {"floor": floor, "ratios": ratios, "same_answers": same, "requests": len(jobs), "ways": found},
        [
            f"{tokens} prompt tokens, {output} of answers; {same} of {len(jobs)} answers are the same, token by token, "
            "continuous and static.",
            f"Floor: prompts {prompts:.1f} s, answers {decoding:.1f} s if always {RUNNING} ran. P50, P99 and longest "
            "are of the times between two tokens of an answer, over all answers.",
            f"Judged with {SMOOTH}. At its floor, continuous batching would be {ceiling:.2f} times as fast as the kind "
            "static way is.",
        ],
    )
