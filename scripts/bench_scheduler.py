"""What a step of the scheduler costs by itself, without a model: a table, then one JSON line.

For each number of running sequences: microseconds of `schedule` and `advance` while all of them decode, and of packing
into arrays; the floor is a loop in Python that only appends a token to each sequence.

    python scripts/bench_scheduler.py [--steps N]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.paged_kv import PagedKv
from engines.runtime.scheduler import Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence

RUNNING = (16, 64, 256, 1024)
BLOCK_SIZE = 16
PROMPT = 40


def decoding(running: int, steps: int) -> Scheduler:
    """A scheduler whose sequences all decode, and others that wait behind them."""
    kv = PagedKv(running * ((PROMPT + steps) // BLOCK_SIZE + 2), BLOCK_SIZE)
    config = SchedulerConfig(running, max(2048, running), headroom=0.0, step_stretch=None)  # prompts at once
    scheduler = Scheduler(kv, config)
    for number in range(2 * running):
        lane = "batch" if number % 2 else "interactive"
        scheduler.submit(Sequence(number, [number, *range(PROMPT - 1)], steps + 50, lane=lane))
    while len(scheduler.running) < running or not all(sequence.decoding for sequence in scheduler.running):
        batch = scheduler.schedule(0.0)
        sampling = [chunk.sequence for chunk in batch if chunk.rows]
        scheduler.advance(batch)
        for sequence in sampling:
            sequence.append(1)
    return scheduler


def measure(running: int, steps: int) -> dict[str, float]:
    """Median microseconds of a step's parts."""
    scheduler = decoding(running, steps)
    taken: dict[str, list[float]] = {"schedule": [], "packing": [], "floor": []}
    for _ in range(steps):
        start = time.perf_counter()
        batch = scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        step_inputs_from_batch(batch, BLOCK_SIZE)
        packed = time.perf_counter()
        scheduler.advance(batch)
        advanced = time.perf_counter()
        for chunk in batch:
            chunk.sequence.append(1)
        appended = time.perf_counter()
        taken["schedule"].append(scheduled - start + advanced - packed)
        taken["packing"].append(packed - scheduled)
        taken["floor"].append(appended - advanced)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{'running':>8}{'schedule, us':>14}{'a sequence':>12}{'packing, us':>13}{'floor, us':>11}")
    results = {}
    for running in RUNNING:
        results[running] = found = measure(running, arguments.steps)
        print(
            f"{running:>8}{found['schedule']:>14.0f}{found['schedule'] / running:>12.2f}"
            f"{found['packing']:>13.0f}{found['floor']:>11.0f}"
        )
    print(json.dumps({"microseconds": results, "steps": arguments.steps}))


if __name__ == "__main__":
    main()
