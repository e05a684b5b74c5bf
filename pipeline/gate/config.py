"""Options of a gate."""

from dataclasses import dataclass, field

from pipeline.gate.generation import GenerationConfig
from pipeline.gate.graphs import GraphFile
from plugins.errors import KilnError


@dataclass(frozen=True)
class GateConfig:
    """How a gate measures. `chunk` tokens of logits at a time: 64 of 49152 words are 12.6 MB a side."""

    schemes: tuple[str, ...] = ("float",)
    """In use in the candidate; the coarsest decides which conventions hold."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    chunk: int = 64
    layer_chunk: int = 128
    """Tokens a step while layers are compared: all of their outputs are in memory for one step."""
    threads: int | None = None
    noise: bool = True
    """Whether the noise floor is measured; without it only conventions and a user's limits judge."""
    layers: bool = True
    """Whether layers are compared, where both sides have a graph."""
    reference_graph: GraphFile | None = None
    candidate_graph: GraphFile | None = None
    """Graphs whose layers are compared; by default those of the two sides, which later passes may have changed."""
    max_trials: int = 8
    """Candidates that are rebuilt to find what to keep in float."""

    def __post_init__(self) -> None:
        for name, least in (("chunk", 2), ("layer_chunk", 1), ("max_trials", 0)):
            if getattr(self, name) < least:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {least}")
