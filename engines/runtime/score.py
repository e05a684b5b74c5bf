"""Logits of a text's positions, straight from a backend: for perplexity and comparison, not for serving."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend
from engines.runtime.batch import Chunk
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.sequence import Sequence as RunningSequence
from engines.runtime.sequence import blocks_for
from plugins.errors import KilnError


def score(
    backend: DecoderBackend, token_ids: Sequence[int], chunk: int = 512, positions: Sequence[int] | None = None
) -> Iterator[NDArray[np.float32]]:
    """Run `token_ids` as one sequence and yield the logits of each chunk of positions, [<= chunk, vocabulary] float32.

    With `positions`, ascending, only theirs.

    Uses the backend's first blocks: no request may run on it meanwhile, and what they held is lost.
    Raises KilnError when the tokens do not fit into the cache, ValueError for no tokens or a chunk below 1.
    """
    if not token_ids or chunk < 1:
        raise ValueError(f"cannot score {len(token_ids)} tokens in chunks of {chunk}")
    size = backend.kv.block_size
    needed = blocks_for(len(token_ids), size)
    if needed > backend.num_blocks:
        raise KilnError(
            f"{len(token_ids)} tokens need {needed} cache blocks of {size} tokens, the engine has "
            f"{backend.num_blocks}; score fewer tokens or open it with more kv_blocks"
        )
    sequence = RunningSequence(0, token_ids, max_tokens=1)
    sequence.blocks = array("i", range(needed))
    wanted = np.arange(len(token_ids)) if positions is None else np.asarray(positions)
    return _chunks(backend, sequence, chunk, wanted)


def _chunks(
    backend: DecoderBackend, sequence: RunningSequence, chunk: int, wanted: NDArray[np.integer]
) -> Iterator[NDArray[np.float32]]:
    while sequence.pending:
        part = Chunk(sequence, sequence.computed, min(chunk, sequence.pending))
        inputs = step_inputs_from_batch((part,), backend.kv.block_size)
        here = wanted[(wanted >= part.start) & (wanted < part.end)] - part.start
        yield backend.step(replace(inputs, logits_indices=here.astype(np.int32)))
        sequence.computed = part.end
