"""What a graph pass is: a name, a declared effect, options in its constructor, and one `call` that says what it did."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

import onnx_graphsurgeon as gs


class Effect(Enum):
    """What a pass may do to the numbers. The manager's numeric gate takes its tolerance from it."""

    EXACT = "exact"
    """Every output keeps its bits, up to a backend that picks another kernel for the same operator."""
    REORDERS = "reorders floating point"
    """Same formula, sums and products in another order."""
    PRECISION = "changes precision"
    """Values are stored or computed in another type."""
    QUANTISES = "quantises"
    """Values are stored or computed in so few bits that the accuracy has to be judged, not the error."""
    MODEL = "changes the model"
    """Another function: its accuracy has to be judged, not its error."""


@dataclass
class Outcome:
    """What one call did: how many rewrites it made, and notes on what it left alone and why.

    `metadata` goes into the model's own: what whoever runs it must know.
    """

    rewrites: int = 0
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return self.rewrites > 0


class Pass(Protocol):
    """A rewrite of a graph in place, its subgraphs included (`passes.graph.scopes`).

    A second call on its own result changes nothing. Tensors that it adds carry dtype and, where known, shape.
    It may leave dead nodes behind: the manager removes them and sorts.
    """

    @property
    def name(self) -> str: ...

    @property
    def effect(self) -> Effect: ...

    def call(self, graph: gs.Graph) -> Outcome:
        """Rewrite `graph`."""
        ...


@runtime_checkable
class Measuring(Protocol):
    """A pass that wants to measure the model by running it before it is called."""

    def prepare(self, model: Path) -> None:
        """`model` is the graph of the next call as a file, its weights beside it."""
        ...


class Refusal(Exception):  # noqa: N818 (an answer of a rule, not an error)
    """Raised by a rule whose pattern matched but whose check failed: the message says why, with what offended."""
