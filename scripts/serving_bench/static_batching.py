"""Static batching on the same backend and kernels: groups of requests run to completion, one group after another.

A group is formed once. All of its prompts are computed in one step; then every step takes one token of each until
the longest answer is done. Knows no scheduler, no queue and no thread, so it pays for none of these.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend, StepInputs
from engines.runtime.sequence import blocks_for
from serving_bench.setting import Job
from serving_bench.trace import Trace


@dataclass(frozen=True)
class StaticBatcher:
    """How much a group wastes.

    keep_finished   sequences that are done go on computing until the whole group is
    pad_prompts     prompts are filled up to the longest one of the group; the filling is computed and attended like
                    text, as costly as what a batcher of rectangular tensors does, so its tokens mean nothing
    """

    keep_finished: bool
    pad_prompts: bool = False

    def run(self, backend: DecoderBackend, jobs: Sequence[Job], size: int) -> list[Trace]:
        """All jobs, which arrive now, in groups of `size`."""
        arrival = time.perf_counter()
        traces = [Trace(arrival) for _ in jobs]
        for first in range(0, len(jobs), size):
            self._run_group(backend, jobs[first : first + size], traces[first : first + size])
        return traces

    def _run_group(self, backend: DecoderBackend, jobs: Sequence[Job], traces: Sequence[Trace]) -> None:
        longest = max(len(job.prompt) for job in jobs)
        filling = [longest - len(job.prompt) if self.pad_prompts else 0 for job in jobs]
        tokens = [np.asarray([0] * fill + list(job.prompt), np.int32) for fill, job in zip(filling, jobs, strict=True)]
        outputs = np.asarray([job.output for job in jobs])
        past = np.zeros(len(jobs), np.int32)
        tables = _tables([len(ids) + outputs.max() for ids in tokens], backend)
        alive = np.arange(len(jobs))
        for made in range(outputs.max()):
            inputs = packed_step([tokens[row] for row in alive], past[alive], tables[alive], backend.kv.block_size)
            chosen = backend.step(inputs).argmax(axis=1).astype(np.int32)
            now = time.perf_counter()
            for row, token in zip(alive.tolist(), chosen, strict=True):
                past[row] += len(tokens[row])
                tokens[row] = np.asarray([token], np.int32)
                if made < outputs[row]:
                    traces[row].times.append(now)
                    traces[row].tokens.append(int(token))
            if not self.keep_finished:
                alive = np.flatnonzero(outputs > made + 1)


def _tables(lengths: Sequence[int], backend: DecoderBackend) -> NDArray[np.int32]:
    """Blocks for all positions of every sequence, side by side from the pool's first."""
    needed = [blocks_for(int(length), backend.kv.block_size) for length in lengths]
    if sum(needed) > backend.num_blocks:
        raise SystemExit(f"static batching needs {sum(needed)} cache blocks, the engine has {backend.num_blocks}")
    tables = np.zeros((len(lengths), max(needed)), np.int32)
    for row, (first, count) in enumerate(_ranges(needed)):
        tables[row, :count] = np.arange(first, first + count)
    return tables


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for count in counts:
        yield first, count
        first += count


def packed_step(
    tokens: Sequence[NDArray[np.int32]], past: NDArray[np.int32], tables: NDArray[np.int32], block_size: int
) -> StepInputs:
    """The inputs of a step that appends `tokens[i]` to a sequence with `past[i]` tokens; logits of each last one."""
    lengths = np.asarray([len(ids) for ids in tokens], np.int32)
    cumulative = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, lengths, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(len(tokens)), lengths)
    width = blocks_for(int((past + lengths).max()), block_size)
    return StepInputs(
        input_ids=np.concatenate(tokens),
        position_ids=positions,
        logits_indices=cumulative[1:] - 1,
        cumulative_sequence_length=cumulative,
        past_seqlens=past.astype(np.int32),
        block_table=np.ascontiguousarray(tables[:, :width]),
        slot_mapping=tables[rows, positions // block_size] * block_size + positions % block_size,
    )
