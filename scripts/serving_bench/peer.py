"""transformers on the same requests, in the same run, on as many threads: FP32, greedy, answers of equal length.

Static batching as its `generate` does it: a group's prompts are padded, and every sequence computes until the longest
answer is done. Takes minutes, so it runs once and on the first group only, beside the same group on the engine.
"""

import asyncio
import time
from collections.abc import Sequence

from pipeline.load import load
from pipeline.source import resolve_source
from serving_bench.batching import jobs_of
from serving_bench.setting import RUNNING, Findings, Job, Setting, percentile
from serving_bench.trace import Trace, all_gaps, follow, seconds_of, tokens_of


def peer(setting: Setting, model: str) -> Findings:
    """`model` names what the bundle was built from."""
    jobs = jobs_of(setting)[:RUNNING]
    with setting.open(share_prefixes=False) as engine:
        ours = asyncio.run(follow(engine, [job.request() for job in jobs]))
    rows, data = [], {}
    for name, traces in (
        ("this engine, continuous", ours),
        ("transformers, generate", _transformers(setting, model, jobs)),
    ):
        rate, p99 = tokens_of(traces) / seconds_of(traces), percentile(all_gaps(traces), 99)
        rows.append((name, f"{rate:.1f}", f"{p99 * 1e3:.0f}"))
        data[name] = {"rate": rate, "p99": p99}
    title = f"transformers on the first {len(jobs)} of these requests"
    return Findings("peer", title, ("stack", "tokens/s", "P99 ms between tokens"), rows, [], data)


def _transformers(setting: Setting, model_name: str, jobs: Sequence[Job]) -> list[Trace]:
    """`generate` with prompts padded on the left; every token's time is when the whole step's are there."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Notes when `generate` hands out each step."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None: ...

    torch.set_num_threads(setting.threads)
    model = load(resolve_source(model_name)).pretrained
    longest, output = max(len(job.prompt) for job in jobs), max(job.output for job in jobs)
    ids = torch.zeros((len(jobs), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, longest - len(job.prompt) :] = 1
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(input_ids=ids[:, -16:], attention_mask=mask[:, -16:], max_new_tokens=2, **options)
    clock = Clock()
    start = time.perf_counter()
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=output, streamer=clock, **options)
    return [Trace(start, clock.times[1 : job.output + 1]) for job in jobs]
