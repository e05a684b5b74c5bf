"""Decode steps as captured graphs: one for each batch size of a ladder, launched with one call and no work on the host.

A batch is padded up to the next size. A padding row is a sequence of one token without a past, whose slot is -1: it
writes nowhere, and what it computes nobody reads. All sizes share the device's input area and the area for logits, and
the block table has one fixed width, of which a step fills as much as it needs.

What a step was captured with must stay where it is: inputs, outputs, caches, and the session's own activations, which
ONNX Runtime takes from an arena that it never gives back. Others use that memory between two steps, in the stream's
order.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.cuda_memory import DeviceMemory, Runtime
from engines.backends.cuda_session import CudaSession
from engines.backends.cuda_staging import Array, Layout, Staging
from plugins.sampling.schema import FEED, SAMPLING_INPUTS

TABLE = "block_table"
_SAMPLING = {name: spec.dtypes[0] for name, spec in SAMPLING_INPUTS.items()}


def ladder_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes to capture for up to `most` sequences: powers of two to 8, then in steps of 8, 16 and 32."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, most, 32)]
    return (*(size for size in sizes if size < most), most)


def is_decode_step(inputs: StepInputs) -> bool:
    """Whether every sequence has one token, and logits are wanted of each, in order."""
    count = len(inputs.past_seqlens)
    rows = inputs.logits_indices
    return len(inputs.input_ids) == count == len(rows) and bool((rows == np.arange(count)).all())


def layout_of_batch(size: int, extras: Mapping[str, str]) -> Layout:
    """The step's inputs, but for the block table, of so many sequences with one token each; `extras` by name: types."""
    row = Array((size,))
    return Layout(
        {
            "cumulative_sequence_length": Array((size + 1,)),
            "past_seqlens": row,
            "input_ids": row,
            "position_ids": row,
            "logits_indices": row,
            "slot_mapping": row,
            **{name: Array((size,), dtype) for name, dtype in extras.items()},
        }
    )


def write_padded(
    views: Mapping[str, NDArray], table: NDArray[np.int32], inputs: StepInputs, extras: Mapping[str, NDArray]
) -> None:
    """Fill a batch's arrays and its table [size, width of `inputs.block_table`] from a step of fewer sequences."""
    count, size = len(inputs.past_seqlens), len(views["past_seqlens"])
    views["cumulative_sequence_length"][:] = np.arange(size + 1, dtype=np.int32)
    views["logits_indices"][:] = np.arange(size, dtype=np.int32)
    for name, padding in (("past_seqlens", 0), ("input_ids", 0), ("position_ids", 0), ("slot_mapping", -1)):
        views[name][:count] = getattr(inputs, name)
        views[name][count:] = padding
    for name, values in extras.items():
        views[name][:count] = values
        views[name][count:] = -1 if name == FEED else 0
    table[:count] = inputs.block_table
    table[count:] = 0


class DecodeGraphs:
    """Captured steps of a session whose caches are allocated. `table_width` is that of the longest context, in blocks.

    `tokens` is where a graph that samples leaves its tokens, None for any other. Without `captured` a step is queued
    through ONNX Runtime each time, with the same kernels on the same shapes: so they can be profiled node by node.

    Raises KilnError when memory is short or a step cannot be captured.
    """

    def __init__(
        self,
        session: CudaSession,
        runtime: Runtime,
        sizes: Sequence[int],
        table_width: int,
        staging: Staging,
        tokens: int | None = None,
        captured: bool = True,
    ) -> None:
        self._captured = captured
        self.sizes = tuple(sorted(sizes))
        self._runtime, self._session, self._staging, self._width = runtime, session, staging, table_width
        most = self.sizes[-1]
        self._tokens = tokens
        self._extras = {} if tokens is None else {FEED: "int32", **_SAMPLING}
        self._layouts = {size: layout_of_batch(size, self._extras) for size in self.sizes}
        self._bindings: dict[int, Any] = {}
        self._graphs: dict[int, int] = {}
        with ExitStack() as memory:  # given back where a later part fails

            def kept(part: Any) -> Any:
                return memory.enter_context(closing(part))

            size = self._layouts[most].size
            staging.reserve(size)
            self._inputs: DeviceMemory = kept(DeviceMemory(runtime, size, "the inputs of decode steps"))
            self._table: Staging = kept(Staging(runtime, most * table_width * 4, "the block table of decode steps"))
            size = most * session.vocabulary * 4
            self._logits: DeviceMemory = kept(DeviceMemory(runtime, size, f"logits of {most} sequences"))
            memory.callback(self._free_graphs)
            for size in reversed(self.sizes):  # the largest first: the others find memory for their activations
                self._capture(size)
            self._memory = memory.pop_all()

    @property
    def logits_address(self) -> int:
        """Where a step leaves its logits, float32 [size, vocabulary], those of padding after the others."""
        return self._logits.address

    def size_for(self, inputs: StepInputs) -> int | None:
        """The captured size that a step takes; None where it must run without a graph."""
        count, width = inputs.block_table.shape
        if count > self.sizes[-1] or width > self._width or not is_decode_step(inputs):
            return None
        return next(size for size in self.sizes if size >= count)

    def launch(self, inputs: StepInputs, extras: Mapping[str, NDArray], size: int, turn: int) -> None:
        """Queue a step of at most `size` sequences; `extras` [sequences] are what a graph that samples takes."""
        self._send(inputs, extras, size, turn)
        if self._captured:
            self._runtime.launch(self._graphs[size])
        else:
            self._session.run(self._bindings[size])

    def close(self) -> None:
        """Free graphs and memory; nothing may be under way. A second call does nothing."""
        self._memory.close()

    def _free_graphs(self) -> None:
        self._bindings = {}
        while self._graphs:
            self._runtime.free_graph(self._graphs.popitem()[1])

    def _send(self, inputs: StepInputs, extras: Mapping[str, NDArray], size: int, turn: int) -> None:
        layout, width = self._layouts[size], inputs.block_table.shape[1]
        table = self._table.area(turn)[: size * width * 4].view(np.int32).reshape(size, width)
        write_padded(layout.views(self._staging.area(turn)), table, inputs, extras)
        self._staging.send(turn, layout.size, self._inputs.address)
        self._table.send_rows(turn, width * 4, self._width * 4, size)

    def _capture(self, size: int) -> None:
        """Run a step of padding alone, so that everything is loaded and allocated, and capture the same again."""
        layout = self._layouts[size]
        binding = self._bindings[size] = self._session.binding()
        self._session.bind_inputs(binding, layout, self._inputs.address, self._staging.host_address(0))
        table = Layout({TABLE: Array((size, self._width))})
        self._session.bind_inputs(binding, table, self._table.address, self._table.host_address(0))
        self._session.bind_logits(binding, size, self._logits.address)
        if self._tokens is not None:
            self._session.bind_tokens(binding, size, self._tokens)
        none = {name: np.empty(0, dtype) for name, dtype in self._extras.items()}
        self._send(_no_sequences(), none, size, 0)
        self._session.run(binding)
        self._runtime.synchronize()
        if self._captured:
            self._graphs[size] = self._runtime.capture(lambda: self._session.run(binding))


def _no_sequences() -> StepInputs:
    none = np.empty(0, np.int32)
    return StepInputs(none, none, none, np.zeros(1, np.int32), none, np.empty((0, 1), np.int32), none)
