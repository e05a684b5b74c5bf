"""What other threads leave for the worker's: arrivals, cancellations, and that it is to close. Any thread may call."""

import threading
from collections.abc import Callable

from engines.runtime.answer import Answer
from plugins.errors import KilnError


class Intake:
    """Holds them until the worker takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all that follows
        self._arrivals: list[Answer] = []
        self._cancelled: list[int] = []
        self._next_id = 0
        self._closing = False
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def new_id(self) -> int:
        with self._changed:
            self._next_id += 1
            return self._next_id

    def put(self, answer: Answer, check: Callable[[int], None]) -> None:
        """Leave an answer that `check` lets pass, given how many have arrived.

        Raises what `check` raises, and KilnError when nothing is taken any more.
        """
        with self._changed:
            if self._failure is not None:
                raise KilnError(f"the engine has stopped: {self._failure!r}; open it again") from self._failure
            if self._closing:
                raise KilnError("the engine is closed; open it again")
            check(sum(1 + len(one.forks) for one in self._arrivals))
            self._arrivals.append(answer)
            self._changed.notify()

    def cancel(self, sequence_id: int) -> None:
        with self._changed:
            self._cancelled.append(sequence_id)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Refuse what comes from now on, and say why."""
        with self._changed:
            self._failure = error

    def take(self, pause: Callable[[], float | None]) -> tuple[list[Answer], list[int]] | None:
        """Wait for something, at most as long as `pause` says (None: for ever), and take it; None when closing."""
        with self._changed:
            while not (self._closing or self._arrivals or self._cancelled):
                seconds = pause()
                if seconds == 0:
                    break
                self._changed.wait(seconds)
            if self._closing:
                return None
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
        return arrivals, cancelled

    def end(self) -> list[Answer]:
        """Take nothing more; gives the answers that nobody has taken."""
        with self._changed:
            self._closing = True
            arrivals, self._arrivals = self._arrivals, []
        return arrivals
