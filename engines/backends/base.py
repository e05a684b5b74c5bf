"""What the runtime asks of an inference library: one packed step, or one plain call.

A backend owns its session and the cache memory. It knows nothing of requests, blocks' owners or
sampling; the caller guarantees that block tables and slots are valid and that one thread calls at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engines.runtime.info import TensorInfo
from plugins.paged_attention.schema import KvSpec

Int32Array = NDArray[np.int32]

MOST_IN_FLIGHT = 2
"""Steps that may have been launched and not collected."""


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


@dataclass(frozen=True)
class SamplingInputs:
    """How each row of a step's logits is sampled; arrays [rows], C-contiguous. Field names are graph input names.

    Their meaning is that of `kiln::Sample` (`plugins.sampling.schema`).
    """

    temperature: NDArray[np.float32]
    top_k: Int32Array
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    sample_position: Int32Array

    @classmethod
    def greedy(cls, rows: int) -> "SamplingInputs":
        """The most likely token for every row."""
        integers, floats = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        return cls(floats, integers, floats, floats, np.zeros(rows, np.int64), integers)


@dataclass(frozen=True)
class StepResult:
    """What a launched step gives, owned by the caller."""

    tokens: Int32Array  # [rows]; -1 for a row without a finite best logit
    logits: NDArray[np.float32] | None  # [rows, vocabulary], where they were asked for


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


@runtime_checkable
class LaunchingBackend(DecoderBackend, Protocol):
    """Samples inside the step, and takes the next step before this one's tokens have reached the caller.

    Steps and moves take effect in the order of the calls. At most `MOST_IN_FLIGHT` steps are launched and not
    collected; `step` is called only when none is. A token of -1 is fed to the next step as some token or other.
    """

    def launch(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, *, logits: bool) -> None:
        """Queue a step and return; the arrays are the backend's from now on, and nobody changes them.

        `feed` [tokens] says for each input id which row of the step launched before gives it; -1: it stands in
        `input_ids`. With `logits`, `collect` gives them, too. Raises as `step`; the step is then not in flight.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, which no longer is afterwards. Raises what it failed with.

        Steps after one that failed go on; what they are fed from it is undefined.
        """
        ...


def launched_step(backend: LaunchingBackend, inputs: StepInputs) -> NDArray[np.float32]:
    """What `step` is of such a backend: one step alone, greedy, for its logits. Raises as `launch` and `collect`."""
    feed = np.full(len(inputs.input_ids), -1, np.int32)
    backend.launch(inputs, SamplingInputs.greedy(len(inputs.logits_indices)), feed, logits=True)
    logits = backend.collect().logits
    assert logits is not None
    return logits


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
