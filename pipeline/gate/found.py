"""What measuring a candidate against the reference gives, before anything is judged."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.compare.comparison import Comparable
from pipeline.compare.subjects import Subject
from pipeline.gate.generation import WrittenRow
from pipeline.gate.layers import LayerRow
from pipeline.gate.limits import Dimension
from pipeline.gate.metrics import Bin


@dataclass(frozen=True)
class Found:
    """One stratum. `values` by metric; `events` replace some of them where limits are derived from this, `scatter` is
    by how much chance alone changes others."""

    name: str
    description: str
    values: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)
    resolution: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, float] = field(default_factory=dict)
    scatter: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    thousands: tuple[Bin, ...] = ()
    curve: tuple[Bin, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    prompts: tuple[WrittenRow, ...] = ()

    @property
    def floor(self) -> dict[str, float]:
        """What limits follow from, if this was an accepted change."""
        return {**self.values, **self.events}


@dataclass(frozen=True)
class Measured:
    """All strata, and layers that could not be matched by name."""

    strata: tuple[Found, ...]
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noise:
    """The accepted change: what it is, and what it does. `reordered` are the same metrics for other sums alone."""

    origin: str
    strata: Mapping[str, Found]
    reordered: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Measurer(Protocol):
    """Holds an opened reference and the data."""

    @property
    def reference(self) -> Subject: ...

    def measure(
        self, candidate: Comparable, dimensions: Collection[Dimension], layers: bool
    ) -> tuple[Subject, Measured]:
        """Open, measure and close a candidate; the subject is given for its description."""
        ...

    def noise(self) -> Noise | None:
        """The noise floor, None where the reference cannot be changed."""
        ...

    def settings(self) -> dict[str, str]:
        """How it is measured, in words."""
        ...
