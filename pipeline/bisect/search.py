"""Which parts of B make its outputs differ from A's: the first one that matters, and the smallest set that explains it.

A part is whatever can be taken from either side: the nodes between two cuts (`GraphParts`), or a pass
(`pipeline.bisect.passes`). An error is relative to A's outputs; how it is measured is the caller's.
"""

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from pipeline.bisect.cuts import Side, Span, common_cuts, spans
from pipeline.bisect.hybrid import Which, write_hybrid
from pipeline.bisect.same import part_digests
from pipeline.progress import Progress
from pipeline.smallest import smallest_set
from plugins.errors import KilnError

_TRIALS = 16
"""Of leaving out single members of a set, to see whether it takes them."""

Measure = Callable[[Path], float]
"""The error of a model's outputs against A's."""


@dataclass(frozen=True)
class Part:
    """Nodes between two cuts, by the names of A's layers in it, or of its nodes where it has none."""

    number: int
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class Found:
    """What a search found. Errors are relative to A's outputs."""

    error: float
    """Of B."""
    parts: int
    changed: tuple[Part, ...]
    """Parts that are not the same on both sides."""
    first: Part | None
    """The first part up to which B's nodes give `share` of the error; None where B's outputs are A's."""
    error_at_first: float
    error_before_first: float
    culprits: tuple[tuple[Part, float], ...]
    """The smallest set found that explains `explained` of the error, each with what it gives alone."""
    explained: float


class Parts(Protocol):
    """What can be taken from A or from B. `changed`: the numbers of the parts that are not the same, in order."""

    total: int
    changed: Sequence[int]

    def part(self, number: int) -> Part: ...

    def error(self, of_b: Collection[int]) -> float:
        """Of A with these parts of B."""
        ...


class GraphParts:
    """Two graphs, cut wherever both can be. Each side, cut and joined again everywhere, must still be what it was."""

    def __init__(self, a: Path, b: Path, measure: Measure, progress: Progress) -> None:
        """Raises KilnError for graphs with no cut in common, and where cutting itself changes an output."""
        self._sides: dict[Which, Side] = {"a": Side(a), "b": Side(b)}
        self._measure, self._progress = measure, progress
        self._cuts = common_cuts(self._sides["a"], self._sides["b"])
        if not self._cuts:
            raise KilnError(
                f"{a} and {b} have no place in common where both could be cut; give graphs that come from one model "
                "and share the names of their tensors"
            )
        self._errors: dict[frozenset[int], float] = {}
        self.total = len(self._cuts) + 1
        digests = [part_digests(side, self._cuts) for side in self._sides.values()]
        self.changed: Sequence[int] = [n for n, (x, y) in enumerate(zip(*digests, strict=True)) if x != y]
        for which in get_args(Which):
            self._check(which)

    def part(self, number: int) -> Part:
        side = self._sides["a"]
        return Part(number, _names(side, spans(side.outputs, self._cuts)[number]))

    def error(self, of_b: Collection[int]) -> float:
        key = frozenset(of_b)
        if key not in self._errors:
            parts: list[Which] = ["b" if number in key else "a" for number in range(self.total)]
            borders = [number for number in range(len(self._cuts)) if parts[number] != parts[number + 1]]
            self._errors[key] = self._error_of(borders, [*(parts[number] for number in borders), parts[-1]])
            self._progress.detail(f"{len(key)} parts of B: error {self._errors[key]:.3g}")
        return self._errors[key]

    def _check(self, which: Which) -> None:
        uncut = self._measure(self._sides[which].path)
        joined = self._error_of(range(len(self._cuts)), [which] * self.total)
        if joined != uncut:
            raise KilnError(
                f"cutting {self._sides[which].path} changed its own outputs: error {joined:.3g} instead of "
                f"{uncut:.3g}; a search would blame the cuts. Please report the model's architecture"
            )

    def _error_of(self, borders: Sequence[int], parts: Sequence[Which]) -> float:
        with tempfile.TemporaryDirectory(dir=self._sides["a"].path.parent, prefix=".kiln-bisect-") as folder:
            return self._measure(write_hybrid(self._sides, [self._cuts[n] for n in borders], parts, Path(folder)))


def search(parts: Parts, share: float = 0.5, explain: float = 0.9, first_only: bool = False) -> Found:
    """Find the first part and, unless `first_only`, the smallest set, which takes a run for every changed part."""
    changed = parts.changed
    everything = tuple(parts.part(number) for number in changed)
    total = parts.error(changed) if changed else 0.0
    if not total:
        return Found(total, parts.total, everything, None, 0.0, 0.0, (), 1.0)
    low, high = 0, len(changed)  # the error of the first `low` changed parts is below the share, that of `high` is not
    errors = {0: 0.0, high: total}
    while high - low > 1:
        middle = (low + high) // 2
        errors[middle] = parts.error(changed[:middle])
        low, high = (low, middle) if errors[middle] >= share * total else (middle, high)
    first = parts.part(changed[high - 1])
    culprits, explained = ((), 0.0) if first_only else _smallest(parts, total, explain)
    return Found(total, parts.total, everything, first, errors[high], errors[low], culprits, explained)


def _smallest(parts: Parts, total: float, explain: float) -> tuple[tuple[tuple[Part, float], ...], float]:
    """Parts by their own error, as many as it takes; then without each one that is not needed after all."""
    alone = {number: parts.error([number]) for number in parts.changed}
    ranked = sorted(alone, key=lambda number: -alone[number])
    trials = 2 * len(ranked).bit_length() + _TRIALS
    chosen = smallest_set(ranked, lambda some: parts.error(some) >= explain * total, trials) or tuple(ranked)
    return tuple((parts.part(number), alone[number]) for number in chosen), parts.error(chosen) / total


def _names(side: Side, span: Span) -> tuple[str, ...]:
    nodes = [side.nodes[index] for index in side.between(span) if side.makes_floats(index)]
    layers = [node for node in nodes if any(name in side.initializers for name in node.input[1:2])]
    return tuple(node.name or node.op_type for node in (layers or nodes))
