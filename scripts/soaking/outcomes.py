"""What came of every request of a soak. Knows neither engines nor HTTP."""

import threading
from collections import Counter


class Outcomes:
    """Counts outcomes by kind of request, and keeps what should not have happened. Any thread may use it."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.wrong: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.begun[kind] += count

    def end(self, kind: str, outcome: object, expected: bool = True) -> None:
        with self._lock:
            self.ended[kind, str(outcome)] += 1
            if not expected:
                self.wrong[f"{kind}: {outcome}"] += 1

    def fault(self, text: str) -> None:
        """Something else that should not have happened."""
        with self._lock:
            self.wrong[text] += 1

    @property
    def without_outcome(self) -> int:
        return self.begun.total() - self.ended.total()

    def lines(self) -> list[str]:
        """A line for each kind."""
        width = max(map(len, self.begun), default=0)
        return [
            f"{kind:<{width}}  {count:>8}  "
            + ", ".join(f"{outcome} {n}" for (of, outcome), n in sorted(self.ended.items()) if of == kind)
            for kind, count in sorted(self.begun.items())
        ]
