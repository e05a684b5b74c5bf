"""What tests of the scheduler share: a small one, and steps of a model that computes nothing."""

from engines.runtime.paged_kv import PagedKv
from engines.runtime.scheduler import Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence

SIZE = 4


def next_token(token_ids) -> int:
    """What a deterministic model would say after these tokens."""
    return (sum(token_ids) * 31 + len(token_ids)) % 97


def run_step(scheduler: Scheduler, now: float = 0.0, batch=None) -> list[Sequence]:
    """Compute one step, of `batch` if given; returns what finished."""
    batch = scheduler.schedule(now) if batch is None else batch
    sampling = [chunk.sequence for chunk in batch if chunk.rows]
    scheduler.advance(batch)
    for sequence in sampling:
        sequence.append(next_token(sequence.token_ids))
        if sequence.used_up:
            scheduler.finish(sequence)
    return [sequence for sequence in sampling if sequence.used_up]


def scheduler_of(blocks: int = 64, **options) -> Scheduler:
    return Scheduler(PagedKv(blocks, SIZE), SchedulerConfig(**{"max_running": 4, "tokens_per_step": 64, **options}))


def lengths(batch) -> list[tuple[int, int]]:
    return [(chunk.sequence.id, chunk.length) for chunk in batch]
