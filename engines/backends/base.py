"""What the runtime asks of an inference library: one packed step, or one plain call.

A backend owns its session and the cache memory. It knows nothing of requests, blocks' owners or
sampling; the caller guarantees that block tables and slots are valid and that one thread calls at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.runtime.info import TensorInfo
from plugins.paged_attention.schema import KvSpec

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class StepInputs:
    """One step's packed tokens; every array is int32 and C-contiguous. Field names are graph input names."""

    input_ids: Int32Array  # [tokens]
    position_ids: Int32Array  # [tokens]
    logits_indices: Int32Array  # [rows], may be empty
    cumulative_sequence_length: Int32Array  # [seqs + 1]
    past_seqlens: Int32Array  # [seqs]
    block_table: Int32Array  # [seqs, max_blocks]
    slot_mapping: Int32Array  # [tokens], -1 writes nothing


class DecoderBackend(Protocol):
    """Runs serving graphs over a paged cache that it allocates once."""

    kv: KvSpec
    num_blocks: int
    host_blocks: int
    """Blocks in host memory beside the cache, for sequences that gave way."""

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step and update the caches in place. Returns logits [rows, vocabulary], owned by the caller."""
        ...

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) one after the other; numbers from `num_blocks` on are the host blocks."""
        ...

    def close(self) -> None:
        """Free session and caches. The backend is unusable afterwards; a second call does nothing."""
        ...


class InferBackend(Protocol):
    """Runs models without a KV cache."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def check(self, inputs: Mapping[str, NDArray]) -> None:
        """Raise KilnError naming a missing, unknown, mis-shaped or mis-typed input. Any thread may call."""
        ...

    def infer(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; the outputs are owned by the caller. Raises as `check`, and KilnError when the model fails."""
        ...

    def close(self) -> None: ...
