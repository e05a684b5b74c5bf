"""Turns the scheduler's batch into the arrays of one step. The only place where positions become slots."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engines.backends.base import Int32Array, SamplingInputs, StepInputs
from engines.runtime.batch import Batch
from engines.runtime.sequence import blocks_for


def step_inputs_from_batch(batch: Batch, block_size: int) -> StepInputs:
    """Packed int32 inputs of a non-empty batch: one block-table row per chunk, `chunk.rows` logits rows of its end.

    The block table is as wide as the longest context in the batch needs; unused entries are 0 and never read.
    """
    assert batch
    lengths = np.fromiter((chunk.length for chunk in batch), np.int32, len(batch))
    cumulative = np.zeros(len(batch) + 1, np.int32)
    np.cumsum(lengths, out=cumulative[1:])
    tokens = int(cumulative[-1])
    past = np.fromiter((chunk.start for chunk in batch), np.int32, len(batch))
    ids = np.empty(tokens, np.int32)
    slots = np.empty(tokens, np.int32)
    positions = np.empty(tokens, np.int32)
    table = np.zeros((len(batch), blocks_for(max(chunk.end for chunk in batch), block_size)), np.int32)
    for row, chunk in enumerate(batch):
        first, sequence = int(cumulative[row]), chunk.sequence
        used = blocks_for(chunk.end, block_size)
        table[row, :used] = np.frombuffer(sequence.blocks, np.int32, used)
        if chunk.length == 1:  # most chunks are single decode tokens: no array arithmetic for them
            ids[first] = sequence.token_ids[chunk.start]
            positions[first] = chunk.start
            slots[first] = sequence.blocks[chunk.start // block_size] * block_size + chunk.start % block_size
        else:
            span = slice(first, first + chunk.length)
            ids[span] = (*sequence.token_ids[chunk.start : chunk.known_end], *chunk.draft)
            positions[span] = where = np.arange(chunk.start, chunk.end, dtype=np.int32)
            slots[span] = table[row, where // block_size] * block_size + where % block_size
    return StepInputs(
        input_ids=ids,
        position_ids=positions,
        logits_indices=_last_rows(batch, cumulative),
        cumulative_sequence_length=cumulative,
        past_seqlens=past,
        block_table=table,
        slot_mapping=slots,
    )


def _last_rows(batch: Batch, cumulative: Int32Array) -> Int32Array:
    """Packed index of the last `chunk.rows` tokens of each chunk."""
    rows = np.fromiter((chunk.rows for chunk in batch), np.int32, len(batch))
    ends = np.repeat(cumulative[1:], rows)
    within = np.arange(len(ends), dtype=np.int32) - np.repeat(np.cumsum(rows, dtype=np.int32), rows)
    return ends + within


class RowSampling(NamedTuple):
    """How one row of logits is sampled, in the words of `plugins.sampling.schema`; the seed as an int64."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0)


def sampling_inputs(rows: Sequence[RowSampling], inputs: StepInputs) -> SamplingInputs:
    """Arrays for the rows of a step, in the order of its logits."""
    columns = zip(*rows, strict=True) if rows else [()] * len(RowSampling._fields)
    temperature, top_k, top_p, min_p, seed = columns
    with np.errstate(over="ignore", under="ignore"):  # a temperature beyond float32 is infinite there, or greedy
        return SamplingInputs(
            np.array(temperature, np.float32),
            np.array(top_k, np.int32),
            np.array(top_p, np.float32),
            np.array(min_p, np.float32),
            np.array(seed, np.int64),
            inputs.position_ids[inputs.logits_indices] + 1,
        )


def feed_from_batch(batch: Batch, inputs: StepInputs, rows: Mapping[int, int]) -> Int32Array:
    """Which row of the step launched before gives each input id, by sequence in `rows`; -1: the id is known."""
    feed = np.full(len(inputs.input_ids), -1, np.int32)
    if rows:
        sources = (rows[chunk.sequence.id] if chunk.sequence.unknown else -1 for chunk in batch)
        feed[inputs.cumulative_sequence_length[:-1]] = np.fromiter(sources, np.int32, len(batch))
    return feed
