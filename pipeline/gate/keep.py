"""Finds the layers to keep in float: the smallest set of the worst ones with which a rebuilt candidate passes.

Keeping more layers is taken to make a candidate no worse. Knows nothing of how a trial is made.
"""

from collections.abc import Callable, Iterable, Sequence

from pipeline.gate.layers import LayerRow
from pipeline.gate.report import KeepAdvice, Trial
from pipeline.smallest import smallest_set

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
    trials: list[Trial] = []

    def passes(keep: tuple[str, ...]) -> bool:
        assert trial is not None
        trials.append(trial(keep))
        return not trials[-1].failed

    keep = None if trial is None else smallest_set(ranking, passes, max_trials)
    return KeepAdvice(keep or tuple(ranking[:_NAMED]), keep is not None, tuple(ranking), tuple(trials))
