"""Decoders in a TensorRT engine: the paged form, whose attention is Kiln's plug-in, and the linear one (`LinearGraph`).

Caches lie on the device and are bound as input and output of one address. Not executed on the machines that Kiln is
tested on, but over a stand-in for the engine: docs/tensorrt.md says which command checks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod

import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16 by name)
import numpy as np
from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.cuda_memory import DeviceMemory, Runtime
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.linear_decoder import LinearCall
from engines.backends.tensorrt.loading import OpenedEngine
from engines.backends.tensorrt.profiles import Profile
from engines.backends.tensorrt.running import EngineRunner, Resident
from passes.onnx_model import Tensor
from plugins.errors import KilnError
from plugins.paged_attention.schema import LOGITS, KvSpec, cache_names, cache_output_names
from plugins.paged_attention.tensorrt_plugin import SCRATCH

_TABLE = "block_table"


class _Caches:
    """Zeroed device memory for each cache input, [rows, ...], and the outputs that continue them."""

    def __init__(self, runtime: Runtime, inputs: Sequence[Tensor], layers: int, rows: int) -> None:
        self.rows, self._runtime = rows, runtime
        self._memory: dict[str, DeviceMemory] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[str, str] = {}
        shapes = {tensor.name: tensor for tensor in inputs}
        for layer in range(layers):
            for name, output in zip(cache_names(layer), cache_output_names(layer), strict=True):
                self._outputs[name] = output
                self.add(shapes[name], (rows,))

    def add(self, tensor: Tensor, leading: tuple[int, ...] = (), output: str | None = None) -> None:
        """One more tensor that stays, zero at first; `leading` are the sizes of its symbols in front."""
        shape = (*leading, *(int(size) for size in tensor.shape[len(leading) :]))
        size = prod(shape) * np.dtype(tensor.dtype).itemsize
        memory = DeviceMemory(self._runtime, size, f"{tensor.name} of {shape[0]} rows")
        self._runtime.clear(memory.address, size)
        self._memory[tensor.name], self._shapes[tensor.name] = memory, shape
        if output is not None:
            self._outputs[tensor.name] = output

    @property
    def names(self) -> list[str]:
        """Of all tensors that stay, inputs and outputs."""
        return [*self._memory, *self._outputs.values()]

    def resident(self, first: int = 0, rows: int | None = None) -> dict[str, Resident]:
        """Rows `first` on of each; all of them by default."""
        found = {}
        for name, memory in self._memory.items():
            shape = self._shapes[name]
            there = Resident(memory.address + first * (memory.size // shape[0]), (rows or shape[0], *shape[1:]))
            found[name] = found[self._outputs[name]] = there
        return found

    def move(self, source: int, target: int) -> None:
        """Queue: copy one row of each cache."""
        for name in self._outputs:
            if self._shapes[name][0] == self.rows:
                memory = self._memory[name]
                size = memory.size // self.rows
                self._runtime.copy(memory.address + target * size, memory.address + source * size, size)

    def close(self) -> None:
        for memory in self._memory.values():
            memory.close()


class _Decoder:
    """What both forms are made of."""

    def __init__(
        self,
        opened: OpenedEngine,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        runtime: Runtime,
        caches: _Caches,
        times: LayerTimes | None,
    ) -> None:
        self._runtime, self._caches = runtime, caches
        self._runner = EngineRunner(opened, inputs, profiles, runtime, caches.names, times)
        logits = next(info for info in self._runner.outputs if info.name == LOGITS)
        vocabulary = logits.shape[-1]
        assert isinstance(vocabulary, int)
        self.vocab_size = vocabulary
        self._open = True

    def close(self) -> None:
        """Free engine and caches. The backend is unusable afterwards; a second call does nothing."""
        if self._open:
            self._open = False
            self._runner.close()
            self._caches.close()
            self._runtime.close()


class TensorRtPagedDecoder(_Decoder):
    """Implements `DecoderBackend`: the scheduler's steps as they are, the cache in blocks."""

    host_blocks = 0

    def __init__(
        self,
        opened: OpenedEngine,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        runtime: Runtime,
        kv: KvSpec,
        times: LayerTimes | None = None,
    ) -> None:
        self.kv, self.num_blocks = kv, profiles[0].symbols["blocks"].most
        self._widest = max(profile.symbols["max_blocks"].most for profile in profiles)
        runtime.enter()
        sized = [_with_sizes(tensor, {"block_size": kv.block_size}) for tensor in inputs]
        caches = _Caches(runtime, sized, len(kv.layers), self.num_blocks)
        scratch = next(tensor for tensor in inputs if tensor.name == SCRATCH)
        caches.add(scratch, output=f"{SCRATCH}_out")
        super().__init__(opened, inputs, profiles, runtime, caches, times)
        small = {info.name for info in self._runner.inputs}
        self._names = [field.name for field in fields(StepInputs) if field.name in small]

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step and update the caches in place. Returns logits [rows, vocabulary], owned by the caller.

        Raises KilnError for a step that no profile takes.
        """
        arrays = {name: getattr(inputs, name) for name in self._names}
        arrays[_TABLE] = widened(inputs.block_table, self._widest)
        rows = len(inputs.logits_indices)
        if not rows:
            arrays["logits_indices"] = np.zeros(1, np.int32)
        logits = self._runner.run(arrays, self._caches.resident())[LOGITS]
        return logits[:rows]

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) one after the other; there are none in host memory."""
        self._runtime.enter()
        for source, target in moves:
            self._caches.move(source, target)


class TensorRtLinearGraph(_Decoder):
    """Implements `LinearGraph`."""

    def __init__(
        self,
        opened: OpenedEngine,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        runtime: Runtime,
        kv: KvSpec,
        times: LayerTimes | None = None,
    ) -> None:
        self.rows = max(profile.symbols["seqs"].most for profile in profiles)
        runtime.enter()
        caches = _Caches(runtime, inputs, len(kv.layers), self.rows)
        super().__init__(opened, inputs, profiles, runtime, caches, times)

    def run(self, call: LinearCall) -> NDArray[np.float32]:
        """Logits [rows, vocabulary]. Raises KilnError for a call that no profile takes."""
        logits: NDArray[np.float32] = self._runner.run(call.inputs(), self._caches.resident(call.first, call.seqs))[
            LOGITS
        ]
        return logits

    def move_row(self, source: int, target: int) -> None:
        self._runtime.enter()
        self._caches.move(source, target)


def widened(table: NDArray[np.int32], widest: int) -> NDArray[np.int32]:
    """A block table of one of few widths, so that steps have shapes that come again. The rest is never read."""
    seqs, width = table.shape
    if width > widest:
        raise KilnError(
            f"a sequence of the step has {width} blocks, the engine was built for {widest}; rebuild it with a longer "
            "context"
        )
    wanted = min(1 << max(width - 1, 0).bit_length(), widest)
    result = np.zeros((seqs, max(wanted, 1)), np.int32)
    result[:, :width] = table
    return result


def _with_sizes(tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
    return Tensor(
        tensor.name,
        tensor.dtype,
        tuple(sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape),
    )
