"""Finds a small set of a ranked list for which something holds, in a bounded number of trials.

What is asked is taken to be monotone: a larger set makes it no less true. The number of items, best first, is doubled
until it holds and then halved between; last, single items are taken out again, as in the last step of delta debugging
(Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002). Knows nothing of models.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


def smallest_set(
    ranking: Sequence[_Item], holds: Callable[[tuple[_Item, ...]], bool], trials: int
) -> tuple[_Item, ...] | None:
    """The smallest set found, None where it holds for none that was tried. `holds` is called at most `trials` times."""
    return _Search(ranking, holds, trials).run() if ranking and trials > 0 else None


class _Search(Generic[_Item]):
    def __init__(self, ranking: Sequence[_Item], holds: Callable[[tuple[_Item, ...]], bool], left: int) -> None:
        self._ranking, self._holds, self._left = ranking, holds, left

    def run(self) -> tuple[_Item, ...] | None:
        count, failed = 1, 0
        while not self._try(self._ranking[:count]):
            if count == len(self._ranking) or not self._left:
                return None
            failed, count = count, min(2 * count, len(self._ranking))
        while count - failed > 1 and self._left:
            middle = (count + failed) // 2
            if self._try(self._ranking[:middle]):
                count = middle
            else:
                failed = middle
        keep = list(self._ranking[:count])
        for name in keep[-2::-1]:  # the last one is needed, if there was time to find out
            rest = [other for other in keep if other != name]
            if rest and self._left and self._try(rest):
                keep = rest
        return tuple(keep)

    def _try(self, items: Sequence[_Item]) -> bool:
        self._left -= 1
        return self._holds(tuple(items))
