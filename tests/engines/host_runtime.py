"""A stand-in for a CUDA device in host memory, so that what does not need a GPU is tested without one.

Work is done when it is queued, ONNX Runtime runs on its CPU provider, and a captured graph is what would be queued.
`live` counts pieces of memory; `size` is what the device has in all.
"""

import ctypes
from collections.abc import Callable

from plugins.cuda_runtime import OutOfDeviceMemoryError


class HostRuntime:
    provider, device_type, device, address, arch, name = "CPUExecutionProvider", "cpu", 0, 1, "sm_90", "host"

    def __init__(self, size: int = 1 << 30) -> None:
        self.size = size
        self.live: dict[int, ctypes.Array] = {}
        self.graphs: dict[int, Callable[[], None]] = {}
        self.launched: list[int] = []
        self.closed = False
        self.events = 0

    def enter(self) -> None:
        assert not self.closed

    def memory(self) -> tuple[int, int]:
        return self.size - sum(map(ctypes.sizeof, self.live.values())), self.size

    def allocate(self, size: int, what: str) -> int:
        if size > self.memory()[0]:
            raise OutOfDeviceMemoryError(f"{what} needs {size} bytes; host has {self.memory()[0]} free of {self.size}")
        piece = (ctypes.c_uint8 * (size + 256)).from_buffer(bytearray(b"\xa5" * (size + 256)))
        start = ctypes.addressof(piece)
        place = start + -start % 256
        self.live[place] = piece
        return place

    allocate_host = allocate

    def free(self, address: int) -> None:
        del self.live[address]

    free_host = free

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * width, width)

    def event(self) -> int:
        self.events += 1
        return self.events

    def record(self, event: int) -> None:
        pass

    def wait(self, event: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture(self, queue: Callable[[], None]) -> int:
        number = len(self.graphs) + 1
        self.graphs[number] = queue
        return number

    def launch(self, graph: int) -> None:
        self.launched.append(graph)
        self.graphs[graph]()

    def free_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def close(self) -> None:
        self.closed = True
