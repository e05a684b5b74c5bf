"""What the C side holds: handles, which name objects, and memory that it was lent.

A handle is a serial number in the place of an address. It is never followed and never reused, so one that is null,
wrong, closed or of another kind is told from a good one. Lent memory is known by its address until it is released.
Knows nothing of engines. Safe from several threads: each operation is one operation on a dictionary.
"""

import itertools
from typing import Any, TypeVar

from plugins.errors import KilnError

_T = TypeVar("_T")
_STEP = 16
"""Handles are multiples of it, like addresses; the serial numbers of statuses (status.c) are odd."""


class HandleError(KilnError):
    """A handle that names nothing, or something else."""


class Handles:
    """Objects by handle."""

    def __init__(self) -> None:
        self._things: dict[int, tuple[str, Any]] = {}
        self._serials = itertools.count(1)

    def add(self, kind: str, thing: object) -> int:
        """A new handle; `kind` is what messages call it."""
        handle = next(self._serials) * _STEP
        self._things[handle] = (kind, thing)
        return handle

    def get(self, handle: int, kind: str, type_: type[_T]) -> _T:
        """Raises HandleError unless the handle names a thing of that kind."""
        return self._checked(handle, kind, type_, self._things.get(handle))

    def remove(self, handle: int, kind: str, type_: type[_T]) -> _T:
        """Like `get`, and the handle names nothing any more; of two threads that try, one succeeds."""
        self.get(handle, kind, type_)
        return self._checked(handle, kind, type_, self._things.pop(handle, None))

    def all(self, type_: type[_T]) -> list[_T]:
        """Every thing of a type."""
        return [thing for _, thing in self._things.copy().values() if isinstance(thing, type_)]

    def _checked(self, handle: int, kind: str, type_: type[_T], found: tuple[str, Any] | None) -> _T:
        if found is None:
            what = "null" if handle == 0 else f"{handle:#x}, which was closed already or never handed out"
            raise HandleError(f"the {kind} handle is {what}; expected an open {kind}")
        if not isinstance(found[1], type_):
            raise HandleError(f"the {kind} handle {handle:#x} is one of another kind ({found[0]}); expected a {kind}")
        return found[1]


class LentMemory:
    """Memory that the C side may read until it releases it, with everything that it points to."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, ...]] = {}

    def lend(self, address: int, *owners: object) -> None:
        """Keep `owners` alive until `address` is released."""
        self._owners[address] = owners

    def release(self, address: int) -> None:
        """Raises KilnError for an address that is not lent now."""
        if self._owners.pop(address, None) is None:
            raise KilnError(
                f"{address:#x} is not there to be released; expected an address from an out-parameter, once"
            )

    def __len__(self) -> int:
        return len(self._owners)
