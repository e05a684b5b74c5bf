"""Lets scrapers read the state of a scheduler and its cache: single numbers, so any thread may."""

from functools import partial

from engines.runtime.kv_cache import KvCache
from engines.runtime.metrics import EngineMetrics
from engines.runtime.scheduler import Scheduler
from engines.runtime.sequence import LANES

_KV_COUNTS = {
    "prefix_lookups": "Sequences that asked for a known beginning",
    "prefix_hits": "Sequences that found one",
    "prefix_saved_tokens": "Tokens that needed no computing because of that",
    "copied_blocks": "Blocks copied because two sequences shared them and one wrote",
    "swapped_blocks": "Blocks taken to host memory",
}


def expose_scheduler(metrics: EngineMetrics, scheduler: Scheduler, kv: KvCache) -> None:
    """Add gauges and counters that read the two when they are asked for."""
    metrics.gauge("running", "Sequences that run", lambda: scheduler.running_count)
    for lane in LANES:
        metrics.gauge(
            f"waiting_{lane}", f"Sequences that wait in the {lane} lane", partial(scheduler.waiting_count, lane)
        )
    metrics.gauge("blocks_free", "Cache blocks without content", lambda: kv.free)
    metrics.gauge("blocks_cached", "Cache blocks that nobody holds, with known content", lambda: kv.cached)
    metrics.gauge("blocks_held", "Cache blocks that sequences hold", lambda: kv.held)
    metrics.counter("preemptions", "Sequences that gave way", lambda: scheduler.preemptions)
    for name, help_text in _KV_COUNTS.items():
        metrics.counter(name, help_text, partial(getattr, kv.statistics, name))
