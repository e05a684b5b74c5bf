"""Steps of hand-placed sequences, for tests of decoder backends."""

import numpy as np

from engines.backends.base import StepInputs


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def prompt(tokens: list[int], blocks: list[int], size: int) -> StepInputs:
    """One sequence from its beginning; logits of every token."""
    where = np.arange(len(tokens), dtype=np.int32)
    table = np.array([blocks], np.int32)
    return StepInputs(
        input_ids=ints(*tokens),
        position_ids=where,
        logits_indices=where,
        cumulative_sequence_length=ints(0, len(tokens)),
        past_seqlens=ints(0),
        block_table=table,
        slot_mapping=(table[0, where // size] * size + where % size).astype(np.int32),
    )


def one_more(tokens: list[int], past: list[int], blocks: list[list[int]], size: int) -> StepInputs:
    """One token of each of some sequences."""
    width = max(map(len, blocks))
    table = np.array([row + [0] * (width - len(row)) for row in blocks], np.int32)
    slots = [row[where // size] * size + where % size for row, where in zip(blocks, past, strict=True)]
    count = np.arange(len(tokens) + 1, dtype=np.int32)
    return StepInputs(ints(*tokens), ints(*past), count[:-1], count, ints(*past), table, ints(*slots))
