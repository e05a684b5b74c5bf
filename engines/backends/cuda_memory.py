"""What a decoder on a device asks of it, and memory that belongs to somebody: given back once, when that ends.

`Runtime` is `plugins.cuda_runtime.CudaRuntime`; tests give one that keeps everything in host memory, so that what does
not need a GPU is tested without one.
"""

import ctypes
from collections.abc import Callable
from typing import Protocol

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
