"""One sequence over a paged cache: the steps that score a text or continue a prompt, without a scheduler."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend, StepInputs
from plugins.errors import KilnError

PREFILL = 256
"""Prompt tokens per step while only the last one's logits are wanted."""


class PagedText:
    """A sequence that fills the blocks 0, 1, 2, ... of a backend; one at a time may use a backend."""

    def __init__(self, backend: DecoderBackend) -> None:
        self._backend = backend
        self._past = 0

    def step(self, token_ids: Sequence[int], keep: int) -> NDArray[np.float32]:
        """Append tokens; logits [keep, vocabulary] of the last `keep` of them."""
        new, past, block_size = len(token_ids), self._past, self._backend.kv.block_size
        capacity = self._backend.num_blocks * block_size
        if past + new > capacity:
            raise KilnError(f"{past + new} tokens do not fit the context of {capacity}; give a shorter text or prompt")
        positions = np.arange(past, past + new, dtype=np.int32)
        blocks = -(-(past + new) // block_size)
        self._past += new
        return self._backend.step(
            StepInputs(
                input_ids=np.asarray(token_ids, np.int32),
                position_ids=positions,
                logits_indices=np.arange(new - keep, new, dtype=np.int32),
                cumulative_sequence_length=np.array([0, new], np.int32),
                past_seqlens=np.array([past], np.int32),
                block_table=np.arange(blocks, dtype=np.int32)[None],
                slot_mapping=positions.copy(),  # block i of the sequence is block i of the pool
            )
        )


def logits_of_text(backend: DecoderBackend, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
    """Logits after every token, `chunk` rows at a time."""
    text = PagedText(backend)
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        yield text.step(part, len(part))


def greedy_continuation(backend: DecoderBackend, token_ids: Sequence[int], tokens: int) -> list[int]:
    """The `tokens` most likely tokens after a prompt, one step each; the lowest id among equals."""
    text = PagedText(backend)
    row = None
    for start in range(0, len(token_ids), PREFILL):
        row = text.step(token_ids[start : start + PREFILL], 1)
    assert row is not None
    generated = [int(row[0].argmax())]
    while len(generated) < tokens:
        generated.append(int(text.step(generated[-1:], 1)[0].argmax()))
    return generated
