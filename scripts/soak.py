"""Random use of a bundle for a long time: does memory stay flat, do all blocks come home, has every request an outcome?

    python scripts/soak.py BUNDLE [--minutes 30] [--over engine|http|device] [--seed N] [--kv-blocks N]

Over `engine` the bundle is opened in this process, over `http` it is served by `kiln serve`; by default each takes half
of the time. Over `device` a bundle for a GPU is opened in this process again and again, and device memory is taken away
from it now and then. Prints what came of the requests, how memory grew, and one JSON line. Exits with 1 when a
request has no outcome or a wrong one, a block is not home, or memory grows surely by more than the limit.
"""

import argparse
import json
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.device import MOST_GROWTH, soak_device_memory
from soaking.in_process import EngineSoak, settled
from soaking.memory import Growth, MemoryWatch
from soaking.outcomes import Outcomes
from soaking.over_http import HttpSoak, Server

from engines.runtime.allocator import share_one_malloc_arena

GROWTH_LIMIT = 4.0
"""MiB an hour; a soak fails when that more is lost is sure,"""
SETTLING = 3.0
"""and when it is more than so many MiB in all: allocators take that long after every warm-up."""


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
    found = report("in this process", outcomes, growth_problems(growth), away, preemptions)
    return found | {"growth": vars(growth)}


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
    found = report("over HTTP, the server's processes", outcomes, growth_problems(growth), away, preemptions)
    return found | {"growth": vars(growth)}


def soak_device(bundle: Path, seconds: float, seed: int, kv_blocks: int | None) -> dict[str, object]:
    outcomes = Outcomes()
    found = soak_device_memory(bundle, outcomes, seconds, seed, kv_blocks)
    problems = []
    if found.growth > MOST_GROWTH:
        problems.append(f"device memory grows by {found.growth:.1f} MiB, more than {MOST_GROWTH:g}")
    if not found.shortages:
        problems.append("no request failed for lack of device memory: none was forced")
    for state, values in (("open", found.opened), ("closed", found.closed)):
        print(f"device memory in use with the engine {state}, MiB: {', '.join(f'{value:.1f}' for value in values)}")
    return report("on the device", outcomes, problems, found.away, found.preemptions) | {"device": vars(found)}


def growth_problems(growth: Growth) -> list[str]:
    print(f"resident memory without pages of files {growth}")
    if growth.lowest > GROWTH_LIMIT and growth.last - growth.first > SETTLING:
        return [f"memory grows by more than {GROWTH_LIMIT:g} MiB/hour"]
    return []


def report(title: str, outcomes: Outcomes, problems: list[str], away: int, preemptions: int) -> dict[str, object]:
    problems += [f"{count} times {text}" for text, count in outcomes.wrong.most_common(20)]
    if outcomes.without_outcome:
        problems.append(f"{outcomes.without_outcome} requests have no outcome")
    if away:
        problems.append(f"{away} blocks are not home")
    if not preemptions:
        problems.append("nothing was preempted: give fewer --kv-blocks")
    print(f"{title}:")
    print("\n".join(outcomes.lines()))
    print(f"{outcomes.begun.total()} requests, {preemptions} preemptions, {away} blocks not home")
    print("\n".join(problems) if problems else "all is well")
    return {
        "title": title,
        "requests": outcomes.begun.total(),
        "outcomes": {f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.ended.items())},
        "preemptions": preemptions,
        "problems": problems,
    }


SOAKS = {"engine": soak_engine, "http": soak_http}
ON_REQUEST = {"device": soak_device}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--over", choices=SOAKS | ON_REQUEST, help="only one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-blocks", type=int, help="by default too few for all requests that may run")
    arguments = parser.parse_args()
    chosen = [(SOAKS | ON_REQUEST)[arguments.over]] if arguments.over else list(SOAKS.values())
    seconds = arguments.minutes * 60 / len(chosen)
    found = [soak(arguments.bundle, seconds, arguments.seed, arguments.kv_blocks) for soak in chosen]
    print(json.dumps(found))
    return 1 if any(one["problems"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
