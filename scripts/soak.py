"""Random use of a bundle for a long time: does memory stay flat, do all blocks come home, has every request an outcome?

    python scripts/soak.py BUNDLE [--minutes 30] [--over engine|http] [--seed N] [--kv-blocks N]

Over `engine` the bundle is opened in this process, over `http` it is served by `kiln serve`; by default each takes half
of the time. Prints what came of the requests, the growth of resident memory, and one JSON line. Exits with 1 when a
request has no outcome or a wrong one, a block is not home, or memory grows surely by more than the limit.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.in_process import EngineSoak
from soaking.memory import Growth, MemoryWatch
from soaking.outcomes import Outcomes
from soaking.over_http import HttpSoak, Server

from engines.runtime.allocator import share_one_malloc_arena

GROWTH_LIMIT = 4.0
"""MiB an hour; a soak fails when that more is lost is sure,"""
SETTLING = 3.0
"""and when it is more than so many MiB in all: allocators take that long after every warm-up."""
SETTLE_SECONDS = 60


def soak_engine(bundle: Path, seconds: float, seed: int, kv_blocks: int | None) -> dict[str, object]:
    share_one_malloc_arena()  # as docs/serving.md advises
    outcomes = Outcomes()
    soak = EngineSoak(bundle, outcomes, seed, kv_blocks)
    with soak.engine:
        watch = MemoryWatch(psutil.Process())
        soak.run(seconds)
        growth = watch.stop()
        away = settled(lambda: soak.blocks_away)
        preemptions = soak.preemptions
    return report("in this process", outcomes, growth, away, preemptions)


def soak_http(bundle: Path, seconds: float, seed: int, kv_blocks: int | None) -> dict[str, object]:
    outcomes = Outcomes()
    server = Server(bundle, kv_blocks)
    try:
        watch = MemoryWatch(server.process)
        HttpSoak(server, outcomes, seed).run(seconds)
        growth = watch.stop()
        away = settled(lambda: int(server.count("kiln_blocks_held")))
        preemptions = int(server.count("kiln_preemptions_total"))
        if restarts := server.count("kiln_engine_restarts_total"):
            outcomes.fault(f"the engine's process was started again {restarts:.0f} times")
    finally:
        code = server.end()
    if code:
        outcomes.fault(f"kiln serve ended with code {code}; expected 0")
    return report("over HTTP, the server's processes", outcomes, growth, away, preemptions)


def settled(away: Callable[[], int]) -> int:
    """Blocks that are not home a while after the last request: those of clients that left are found out soon."""
    end = time.monotonic() + SETTLE_SECONDS
    while (left := away()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def report(title: str, outcomes: Outcomes, growth: Growth, away: int, preemptions: int) -> dict[str, object]:
    print(f"\n{title}:")
    print("\n".join(outcomes.lines()))
    problems = [f"{count} times {text}" for text, count in outcomes.wrong.most_common(20)]
    if outcomes.without_outcome:
        problems.append(f"{outcomes.without_outcome} requests have no outcome")
    if away:
        problems.append(f"{away} blocks are not home")
    if growth.lowest > GROWTH_LIMIT and growth.last - growth.first > SETTLING:
        problems.append(f"memory grows by more than {GROWTH_LIMIT:g} MiB/hour")
    if not preemptions:
        problems.append("nothing was preempted: give fewer --kv-blocks")
    print(f"{outcomes.begun.total()} requests, {preemptions} preemptions, {away} blocks not home")
    print(f"resident memory without pages of files {growth}")
    print("\n".join(problems) if problems else "all is well")
    return {
        "title": title,
        "requests": outcomes.begun.total(),
        "outcomes": {f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.ended.items())},
        "preemptions": preemptions,
        "growth": vars(growth),
        "problems": problems,
    }


SOAKS = {"engine": soak_engine, "http": soak_http}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--over", choices=SOAKS, help="only one of the two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-blocks", type=int, help="by default too few for all requests that may run")
    arguments = parser.parse_args()
    chosen = [SOAKS[arguments.over]] if arguments.over else list(SOAKS.values())
    seconds = arguments.minutes * 60 / len(chosen)
    found = [soak(arguments.bundle, seconds, arguments.seed, arguments.kv_blocks) for soak in chosen]
    print(json.dumps(found))
    return 1 if any(one["problems"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
