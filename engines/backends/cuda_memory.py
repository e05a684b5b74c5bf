"""What a decoder on a device asks of it, and memory that belongs to somebody: given back once, when that ends.

`Runtime` is `plugins.cuda_runtime.CudaRuntime`; tests give one that keeps everything in host memory, so that what does
not need a GPU is tested without one.
"""

import ctypes
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from plugins.errors import KilnError
from plugins.paged_attention.schema import KvSpec

RESERVE = 0.1
"""Share of a device's memory that an automatic cache leaves to activations, workspaces and captured graphs."""


class Runtime(Protocol):
    """See `plugins.cuda_runtime.CudaRuntime`, whose methods these are."""

    provider: str
    device_type: str
    device: int
    address: int
    arch: str
    name: str

    def enter(self) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def allocate(self, size: int, what: str) -> int: ...
    def free(self, address: int) -> None: ...
    def allocate_host(self, size: int, what: str) -> int: ...
    def free_host(self, address: int) -> None: ...
    def clear(self, address: int, size: int) -> None: ...
    def copy(self, target: int, source: int, size: int) -> None: ...
    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int) -> None: ...
    def event(self) -> int: ...
    def record(self, event: int) -> None: ...
    def wait(self, event: int) -> None: ...
    def synchronize(self) -> None: ...
    def capture(self, queue: Callable[[], None]) -> int: ...
    def launch(self, graph: int) -> None: ...
    def free_graph(self, graph: int) -> None: ...
    def close(self) -> None: ...


class DeviceMemory:
    """A piece of device memory."""

    def __init__(self, runtime: Runtime, size: int, what: str) -> None:
        self._runtime, self.size = runtime, size
        self.address = runtime.allocate(size, what)

    def close(self) -> None:
        """Give it back; waits for the device. A second call does nothing."""
        if self.address:
            self._runtime.free(self.address)
            self.address = 0


class PinnedMemory:
    """A piece of pinned host memory; `bytes` is a view of it."""

    def __init__(self, runtime: Runtime, size: int, what: str) -> None:
        self._runtime, self.size = runtime, size
        self.address = runtime.allocate_host(size, what)
        whole = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(whole)

    def close(self) -> None:
        """Give it back; nobody may use `bytes` any more. A second call does nothing."""
        if self.address:
            self._runtime.free_host(self.address)
            self.address = 0


_Memory = TypeVar("_Memory", DeviceMemory, PinnedMemory)


class Growing(Generic[_Memory]):
    """A piece of memory that is replaced by a larger one where more is needed; nothing of it is kept then."""

    def __init__(self, runtime: Runtime, kind: Callable[[Runtime, int, str], _Memory], what: str) -> None:
        self._runtime, self._what = runtime, what
        self._kind: Callable[[Runtime, int, str], _Memory] = kind
        self._memory: _Memory | None = None

    def of(self, size: int) -> _Memory:
        """The piece, at least so large: waits for the device where it must be replaced."""
        if self._memory is None or self._memory.size < size:
            self._runtime.synchronize()
            self.close()
            self._memory = self._kind(self._runtime, 1 << max(size - 1, 1).bit_length(), self._what)
        return self._memory

    def close(self) -> None:
        """Give it back. A second call does nothing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def fitting_blocks(runtime: Runtime, kv: KvSpec, most: int) -> int:
    """Cache blocks for what the device has free now, without a reserve, but at most `most`.

    Raises KilnError where not one fits.
    """
    free, total = runtime.memory()
    room = free - int(RESERVE * total)
    blocks = min(most, room // kv.bytes_per_block)
    if blocks < 1:
        raise KilnError(
            f"beside the engine, {runtime.name} has {free / 2**30:.2f} GiB free of {total / 2**30:.2f} GiB, of which "
            f"{RESERVE:.0%} stay free; not one cache block of {kv.bytes_per_block} bytes fits: use a larger GPU, end "
            "what else runs on it, or give kv_blocks"
        )
    return blocks
