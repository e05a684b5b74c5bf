"""Finds the layers to keep in float: the smallest set of the worst ones with which a rebuilt candidate passes.

Keeping more layers is taken to make a candidate no worse, so the number of layers, worst first, is doubled until it
passes and then halved between; last, single layers are taken out again. Knows nothing of how a trial is made.
"""

from collections.abc import Callable, Iterable, Sequence

from pipeline.gate.layers import LayerRow
from pipeline.gate.report import KeepAdvice, Trial

_NAMED = 5
"""Layers that are named where none were tried, or none helped."""


def rank_layers(strata: Iterable[Sequence[LayerRow]]) -> tuple[str, ...]:
    """Layers that added noise on any stratum, the one that added most first."""
    added: dict[str, float] = {}
    for rows in strata:
        for row in rows:
            added[row.name] = max(added.get(row.name, 0.0), row.added)
    return tuple(name for name in sorted(added, key=lambda name: -added[name]) if added[name] > 0)


def advise(ranking: Sequence[str], trial: Callable[[Sequence[str]], Trial] | None, max_trials: int) -> KeepAdvice:
    """`trial` rebuilds and judges a candidate with some layers kept; None only ranks."""
    if trial is None or not ranking or max_trials < 1:
        return KeepAdvice(tuple(ranking[:_NAMED]), False, tuple(ranking))
    search = _Search(ranking, trial, max_trials)
    keep = search.run()
    return KeepAdvice(keep or tuple(ranking[:_NAMED]), keep is not None, tuple(ranking), tuple(search.trials))


class _Search:
    def __init__(self, ranking: Sequence[str], trial: Callable[[Sequence[str]], Trial], left: int) -> None:
        self._ranking, self._trial, self._left = ranking, trial, left
        self.trials: list[Trial] = []

    def run(self) -> tuple[str, ...] | None:
        count, failed = 1, 0
        while not self._passes(self._ranking[:count]):
            if count == len(self._ranking) or not self._left:
                return None
            failed, count = count, min(2 * count, len(self._ranking))
        while count - failed > 1 and self._left:
            middle = (count + failed) // 2
            if self._passes(self._ranking[:middle]):
                count = middle
            else:
                failed = middle
        keep = list(self._ranking[:count])
        # With one layer less from the end it failed, if there was time to try; others may not be needed either.
        for name in keep[-2::-1] if len(keep) > 1 else []:
            rest = [other for other in keep if other != name]
            if self._left and self._passes(rest):
                keep = rest
        return tuple(keep)

    def _passes(self, keep: Sequence[str]) -> bool:
        assert self._left > 0
        self._left -= 1
        self.trials.append(self._trial(tuple(keep)))
        return not self.trials[-1].failed
