"""A paged step on a linear cache: what the scheduler hands out, as calls of a graph by `linear_graph`.

A block of such a cache is one sequence's whole context, so its number is the sequence's row, and nothing is shared. A
call takes neighbouring rows with equally many new tokens: sequences that decode go together, the rows that lie between
them along; every other sequence goes alone. Knows neither TensorRT nor where the cache lies (`LinearGraph` does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import Int32Array, StepInputs
from engines.backends.onnxruntime import session_from_file
from plugins.errors import KilnError
from plugins.paged_attention.schema import LOGITS, KvSpec, cache_names, cache_output_names


@dataclass(frozen=True)
class LinearCall:
    """Rows `first` on of the cache, `step` new tokens each. `rows` are those whose logits are wanted, at least one."""

    first: int
    input_ids: Int32Array  # [seqs, step]
    past: Int32Array  # [seqs]: valid positions before the call
    rows: Int32Array  # [rows], of seqs*step tokens

    @property
    def seqs(self) -> int:
        return len(self.past)

    def inputs(self) -> dict[str, Int32Array]:
        """By the names of the graph's inputs."""
        return {"input_ids": self.input_ids, "past_seqlens": self.past, "logits_indices": self.rows}


class LinearGraph(Protocol):
    """Runs the graph over a cache that it owns, [rows, kv_heads, max_context, head_dim] for each layer."""

    vocab_size: int

    def run(self, call: LinearCall) -> NDArray[np.float32]:
        """Logits [rows, vocabulary], owned by the caller; the cache's rows are updated in place."""
        ...

    def move_row(self, source: int, target: int) -> None:
        """Copy what a row holds, on the device or, from the number of rows on, in host memory."""
        ...

    def close(self) -> None: ...


class LinearDecoder:
    """Implements `DecoderBackend`. `kv` is that of the linear graph: its block size is the longest context."""

    host_blocks = 0

    def __init__(self, graph: LinearGraph, kv: KvSpec, rows: int) -> None:
        self.kv, self.num_blocks = kv, rows
        self._graph = graph
        self._lengths = np.zeros(rows, np.int32)  # what each row holds, so that a row that goes along loses nothing

    @property
    def vocab_size(self) -> int:
        return self._graph.vocab_size

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step. Returns logits [rows, vocabulary], owned by the caller.

        Raises KilnError for a step that only a paged cache can run.
        """
        if (inputs.slot_mapping < 0).any():
            raise KilnError("the step has a token whose key and value are not written: a linear cache shares no blocks")
        logits = np.empty((len(inputs.logits_indices), self.vocab_size), np.float32)
        counts = np.diff(inputs.cumulative_sequence_length)
        decoding = np.flatnonzero(counts == 1)
        others = np.flatnonzero(counts > 1)
        if decoding.size:
            self._decode(inputs, decoding, logits)
        for sequence in others:
            self._alone(inputs, int(sequence), logits)
        return logits

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self._graph.move_row(source, target)
            self._lengths[target] = self._lengths[source]

    def close(self) -> None:
        self._graph.close()

    def _decode(self, inputs: StepInputs, sequences: "NDArray[np.intp]", logits: NDArray[np.float32]) -> None:
        """One token of each sequence. A row in between gets one behind all that it holds, which nobody will read.

        A row that is full has a sequence that has ended: its last position may go.
        """
        rows = inputs.block_table[sequences, 0]
        first, last = int(rows.min()), int(rows.max())
        tokens = inputs.cumulative_sequence_length[sequences]
        ids, past = np.zeros((last - first + 1, 1), np.int32), self._lengths[first : last + 1].copy()
        np.minimum(past, self.kv.block_size - 1, out=past)
        ids[rows - first, 0] = inputs.input_ids[tokens]
        past[rows - first] = inputs.past_seqlens[sequences]
        self._lengths[rows] = inputs.past_seqlens[sequences] + 1
        row_of = dict(zip(tokens.tolist(), (rows - first).tolist(), strict=True))
        self._run(inputs, first, ids, past, row_of, logits)

    def _alone(self, inputs: StepInputs, sequence: int, logits: NDArray[np.float32]) -> None:
        begin, end = inputs.cumulative_sequence_length[sequence : sequence + 2].tolist()
        row, past = int(inputs.block_table[sequence, 0]), inputs.past_seqlens[sequence : sequence + 1]
        self._lengths[row] = int(past[0]) + end - begin
        row_of = {token: token - begin for token in range(begin, end)}
        self._run(inputs, row, inputs.input_ids[None, begin:end], past, row_of, logits)

    def _run(
        self,
        inputs: StepInputs,
        first: int,
        ids: Int32Array,
        past: Int32Array,
        row_of: Mapping[int, int],
        logits: NDArray[np.float32],
    ) -> None:
        """One call; `row_of` has the call's row of each of the step's tokens in it."""
        wanted = [number for number, token in enumerate(inputs.logits_indices.tolist()) if token in row_of]
        rows = np.array([row_of[int(inputs.logits_indices[number])] for number in wanted] or [0], np.int32)
        found = self._graph.run(LinearCall(first, np.ascontiguousarray(ids), np.ascontiguousarray(past), rows))
        if wanted:
            logits[wanted] = found


class OrtLinearGraph:
    """The same graph in ONNX Runtime on the CPU: what a build is judged by, and how this module is tested.

    Each call copies the rows that it takes. Implements `LinearGraph`.
    """

    def __init__(self, path: Path, kv: KvSpec, rows: int, threads: int | None = None) -> None:
        self._session = session_from_file(path, "CPUExecutionProvider", [], threads, optimized=False)
        self.vocab_size = int(next(o for o in self._session.get_outputs() if o.name == LOGITS).shape[1])
        dtype = np.float16 if kv.dtype == "float16" else np.float32
        self._outputs = {}
        self._caches: dict[str, NDArray] = {}
        for layer, geometry in enumerate(kv.layers):
            shape = (rows, geometry.kv_heads, kv.block_size, geometry.head_dim)
            for name, output in zip(cache_names(layer), cache_output_names(layer), strict=True):
                self._caches[name], self._outputs[output] = np.zeros(shape, dtype), name

    def run(self, call: LinearCall) -> NDArray[np.float32]:
        taken = slice(call.first, call.first + call.seqs)
        caches = {name: cache[taken] for name, cache in self._caches.items()}
        logits, *after = self._session.run([LOGITS, *self._outputs], {**call.inputs(), **caches})
        for name, values in zip(self._outputs.values(), after, strict=True):
            self._caches[name][taken] = values
        result: NDArray[np.float32] = logits
        return result

    def move_row(self, source: int, target: int) -> None:
        for cache in self._caches.values():
            cache[target] = cache[source]

    def close(self) -> None:
        self._caches.clear()
