"""Serving graphs on a CUDA device: fixed buffers, one stream, captured decode steps. Implements `DecoderBackend`.

A step's inputs go over in one copy from pinned memory. Steps in which every sequence has one token are launched as
captured graphs (`engines.backends.cuda_graphs`); prompts and mixed steps run through ONNX Runtime on the same stream.
Knows nothing of requests.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.cuda_graphs import DecodeGraphs
from engines.backends.cuda_memory import DeviceMemory, Growing, PinnedMemory, Runtime, fitting_blocks
from engines.backends.cuda_session import MOST_ROWS, CudaSession
from engines.backends.cuda_staging import TURNS, Array, Layout, Staging
from plugins.cuda_runtime import CudaError, CudaRuntime
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvSpec

_FIRST_INPUTS = 1 << 20
"""Bytes of the input areas at first."""


class CudaDecoder:
    """A serving graph with its cache on a device. Implements `DecoderBackend`.

    Args:
        engine: the .onnx file; inputs and outputs are named as in `plugins.paged_attention.schema`.
        kv: cache layout.
        num_blocks: blocks of the cache, or None for what fits beside the engine, at most `most_blocks`.
        max_context: tokens of the longest sequence.
        host_blocks: blocks in pinned host memory to which `move_blocks` can move content out of the cache.
        window: attend to so many tokens only, for a cache of rings; None attends as the graph says.
        plugins: libraries with the graph's custom operators.
        ladder: decode batch sizes to capture; empty for none.
        options: of ONNX Runtime's CUDA provider.
        runtime: the device; by default the first CUDA device.
        profile: where ONNX Runtime's own profile of the session goes, see `end_profile`. Steps of the ladder are not
            captured then, but run through ONNX Runtime, once each when the decoder is made.

    Raises KilnError when there is no such device, the graph cannot be loaded or does not follow the schema, or memory
    is short.
    """

    _samples = False  # whether the graph chooses tokens, which takes more inputs

    def __init__(
        self,
        engine: Path,
        kv: KvSpec,
        num_blocks: int | None,
        *,
        max_context: int,
        most_blocks: int = 1,
        host_blocks: int = 0,
        window: int | None = None,
        plugins: Sequence[Path] = (),
        ladder: Sequence[int] = (),
        options: Mapping[str, str] | None = None,
        runtime: Runtime | None = None,
        profile: Path | None = None,
    ) -> None:
        if num_blocks is not None and num_blocks < 1:
            raise KilnError(f"the cache has {num_blocks} blocks; expected at least 1")
        self.kv, self.host_blocks = kv, host_blocks
        self._open: list[Any] = []  # what must be closed, in the order in which it was made
        self._runtime = self._kept(runtime or CudaRuntime())
        try:
            self._prepare(engine, num_blocks, most_blocks, max_context, window, plugins, ladder, options or {}, profile)
        except BaseException:
            self.close()
            raise

    def _prepare(
        self,
        engine: Path,
        num_blocks: int | None,
        most_blocks: int,
        max_context: int,
        window: int | None,
        plugins: Sequence[Path],
        ladder: Sequence[int],
        options: Mapping[str, str],
        profile: Path | None,
    ) -> None:
        runtime = self._runtime
        runtime.enter()
        self._session: CudaSession = self._kept(
            CudaSession(engine, self.kv, runtime, plugins, window, options, self._samples, profile)
        )
        self.num_blocks = fitting_blocks(runtime, self.kv, most_blocks) if num_blocks is None else num_blocks
        self._session.allocate_caches(self.num_blocks)
        self._host_caches = {
            tensor.name: self._kept(
                PinnedMemory(runtime, self.host_blocks * self._session.block_bytes(tensor), "blocks in host memory")
            )
            for tensor in (self._session.tensors if self.host_blocks else ())
        }
        self._staging: Staging = self._kept(Staging(runtime, _FIRST_INPUTS, "a step's inputs"))
        self._logits: Growing[DeviceMemory] = self._kept(Growing(runtime, DeviceMemory, "logits on the device"))
        self._results: list[Growing[PinnedMemory]] = [
            self._kept(Growing(runtime, PinnedMemory, "logits on the host")) for _ in range(TURNS)
        ]
        self._events = [runtime.event() for _ in range(TURNS)]
        self._tokens: DeviceMemory | None = None
        if self._samples:
            self._tokens = self._kept(DeviceMemory(runtime, MOST_ROWS * 4, "chosen tokens"))
        self._binding: Any = self._session.binding()
        self._graphs: DecodeGraphs | None = None
        if ladder:
            width = -(-max_context // self.kv.block_size)
            tokens = None if self._tokens is None else self._tokens.address
            graphs = DecodeGraphs(self._session, runtime, ladder, width, self._staging, tokens, profile is None)
            self._graphs = self._kept(graphs)

    @property
    def vocab_size(self) -> int:
        return self._session.vocabulary

    @property
    def cache_addresses(self) -> dict[str, int]:
        """Device address of every cache buffer by graph input name; it never changes."""
        return self._session.cache_addresses

    @property
    def ladder(self) -> tuple[int, ...]:
        """Decode batch sizes that run as captured graphs."""
        return () if self._graphs is None else self._graphs.sizes

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step and update the caches in place. Returns logits [rows, vocabulary], owned by the caller.

        Raises KilnError; the step's sequences must then be given up.
        """
        self._enter()
        self._fetch_logits(self._queue(inputs, {}, 0), len(inputs.logits_indices), 0)
        self._runtime.record(self._events[0])
        self._runtime.wait(self._events[0])
        return self._fetched_logits(len(inputs.logits_indices), 0)

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) one after the other; numbers from `num_blocks` on are the host blocks.

        Returns at once: steps that follow come after it in the stream.
        """
        self._enter()
        caches = self._session.cache_addresses
        for tensor in self._session.tensors:
            size = self._session.block_bytes(tensor)
            host = self._host_caches[tensor.name].address if self.host_blocks else 0
            for numbers in moves:
                source, target = (
                    caches[tensor.name] + n * size if n < self.num_blocks else host + (n - self.num_blocks) * size
                    for n in numbers
                )
                self._runtime.copy(target, source, size)

    @property
    def stream(self) -> int:
        """Handle of the CUDA stream to which steps are queued."""
        return self._runtime.address

    @property
    def profile_start(self) -> int:
        """When a profile's clock began, in nanoseconds of `time.time_ns`."""
        return self._session.profile_start

    def end_profile(self) -> Path:
        """The JSON file of a decoder made with `profile`; nothing more is written to it."""
        return self._session.end_profile()

    def close(self) -> None:
        """Free graphs, session, caches and stream. The backend is unusable afterwards; a second call does nothing."""
        if not self._open:
            return
        self._runtime.enter()
        self._binding = None
        while self._open:
            with suppress(CudaError):  # where a step failed, so does everything: the process gives the memory back
                self._open.pop().close()

    def _enter(self) -> None:
        if not self._open:
            raise RuntimeError("the backend is closed")
        self._runtime.enter()

    def _queue(self, inputs: StepInputs, extras: Mapping[str, NDArray], turn: int) -> int:
        """Queue a step; returns the device address of its logits. `extras` are what a graph that samples takes."""
        size = None if self._graphs is None else self._graphs.size_for(inputs)
        if size is not None:
            assert self._graphs is not None
            self._graphs.launch(inputs, extras, size, turn)
            return self._graphs.logits_address
        arrays = {field.name: getattr(inputs, field.name) for field in fields(inputs)} | dict(extras)
        layout = Layout({name: Array(array.shape, array.dtype.name) for name, array in arrays.items()})
        self._staging.reserve(layout.size)
        for name, view in layout.views(self._staging.area(turn)).items():
            view[...] = arrays[name]
        self._staging.send(turn, layout.size)
        rows = len(inputs.logits_indices)
        address = self._logits.of(rows * self.vocab_size * 4).address
        self._session.bind_inputs(self._binding, layout, self._staging.address, self._staging.host_address(turn))
        self._session.bind_logits(self._binding, rows, address)
        if self._tokens is not None:
            if rows > MOST_ROWS:
                raise KilnError(f"a step has {rows} rows of logits; expected at most {MOST_ROWS}: take fewer at a time")
            self._session.bind_tokens(self._binding, rows, self._tokens.address)
        self._session.run(self._binding)
        return address

    def _fetch_logits(self, address: int, rows: int, turn: int) -> None:
        """Queue the copy of a step's logits to the host."""
        size = rows * self.vocab_size * 4
        result = self._results[turn].of(size)
        if size:
            self._runtime.copy(result.address, address, size)

    def _fetched_logits(self, rows: int, turn: int) -> NDArray[np.float32]:
        """A copy of what `_fetch_logits` brought, once the device has passed it."""
        shape = (rows, self.vocab_size)
        size = rows * self.vocab_size * 4
        return np.array(self._results[turn].of(size).bytes[:size].view(np.float32).reshape(shape))

    def _kept(self, part: Any) -> Any:
        self._open.append(part)
        return part
