"""A step's small arrays on their way to the device: packed into pinned memory, brought over with one copy.

Two pinned areas take turns, because the device may still read the one before while the next step is written. On the
device there is one area, which the stream's order protects. Knows arrays and sizes; not what they mean.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from engines.backends.cuda_memory import DeviceMemory, PinnedMemory, Runtime

_ALIGNMENT = 64
"""Of every array: the kernels read 16 bytes at a time."""
TURNS = 2
"""Steps that may be under way at a time."""


@dataclass(frozen=True)
class Array:
    """Shape and type of one array."""

    shape: tuple[int, ...]
    dtype: str = "int32"

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def room(self) -> int:
        """Bytes up to where the next array may begin."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Where each of some arrays lies in an area."""

    arrays: Mapping[str, Array]

    @cached_property
    def offsets(self) -> dict[str, int]:
        places, place = {}, 0
        for name, array in self.arrays.items():
            places[name] = place
            place += array.room
        return places

    @cached_property
    def size(self) -> int:
        """Bytes of the whole area."""
        return sum(array.room for array in self.arrays.values())

    def views(self, area: NDArray[np.uint8]) -> dict[str, NDArray]:
        """The arrays in an area of host memory."""
        return {
            name: area[place : place + self.arrays[name].size]
            .view(self.arrays[name].dtype)
            .reshape(self.arrays[name].shape)
            for name, place in self.offsets.items()
        }


class Staging:
    """Pinned areas and a device area of at least `size` bytes; they grow where a step needs more."""

    def __init__(self, runtime: Runtime, size: int, what: str) -> None:
        self._runtime, self._what = runtime, what
        self._memory = ExitStack()
        self._allocate(size)

    @property
    def address(self) -> int:
        """Of the device area."""
        return self._device.address

    def reserve(self, size: int) -> None:
        """Have areas of `size` bytes, with room to spare where they must grow: waits for the device then.

        Where memory is short, the areas stay as they were.
        """
        if size > self._device.size:
            self._runtime.synchronize()
            self._allocate(1 << (size - 1).bit_length())

    def _allocate(self, size: int) -> None:
        with ExitStack() as fresh:  # all of them or none
            device = fresh.enter_context(closing(DeviceMemory(self._runtime, size, self._what)))
            areas = (closing(PinnedMemory(self._runtime, size, self._what)) for _ in range(TURNS))
            pinned = [fresh.enter_context(area) for area in areas]
            self._memory.close()
            self._device, self._pinned, self._memory = device, pinned, fresh.pop_all()

    def area(self, turn: int) -> NDArray[np.uint8]:
        """The pinned area of a turn; the step that used it before must have been collected."""
        return self._pinned[turn].bytes

    def host_address(self, turn: int) -> int:
        """Of the pinned area of a turn."""
        return self._pinned[turn].address

    def send(self, turn: int, size: int, target: int | None = None) -> None:
        """Queue the copy of the area's first bytes to the device: to this staging's own area, or to `target`."""
        self._runtime.copy(self._device.address if target is None else target, self._pinned[turn].address, size)

    def send_rows(self, turn: int, width: int, pitch: int, rows: int) -> None:
        """Queue the copy of rows of `width` bytes, side by side, to rows `pitch` bytes apart."""
        self._runtime.copy_rows(self._device.address, pitch, self._pinned[turn].address, width, rows)

    def close(self) -> None:
        """Give all areas back. A second call does nothing."""
        self._memory.close()
