"""Options of a search, and the sizes that it tries where none are given."""

import math
from dataclasses import dataclass, field

from pipeline.load_test.report import Slo
from pipeline.tune.search import OBJECTIVES, Objective
from plugins.errors import KilnError


@dataclass(frozen=True)
class Sizes:
    """What is tried: the largest batch, tokens of a step, tokens of a block besides the bundle's own."""

    max_batch: int
    chunk_sizes: tuple[int, ...]
    block_sizes: tuple[int, ...]


ON_CPU = Sizes(64, (128, 256, 512, 1024, 2048), (8, 16, 32, 64))
ON_GPU = Sizes(256, (512, 1024, 2048, 4096, 8192), ())
"""The block size is the build's there: its attention is as fast with any."""


@dataclass(frozen=True)
class TuneConfig:
    """Options of a search. Times in seconds; `most_latency` limits the goodput of models without a KV cache."""

    objective: Objective = "throughput"
    slo: Slo = field(default_factory=Slo)
    most_latency: float | None = None
    budget: float = 600.0
    repetitions: int = 3
    window: float = 2.0
    max_batch: int | None = None
    chunk_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    """These three None: what suits the bundle's device, `ON_CPU` or `ON_GPU`."""
    kv_blocks: int | None = None
    length: int | None = None
    """Size of the dynamic dimensions, besides the batch, of a model without a KV cache; None: its smallest."""
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise KilnError(f"the objective is {self.objective!r}; expected one of {', '.join(OBJECTIVES)}")
        for name in ("budget", "window"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise KilnError(f"{name} is {getattr(self, name)}; expected a positive number of seconds")
        for name in ("repetitions", "max_batch", "kv_blocks", "length", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KilnError(f"{name} is {value}; expected at least 1")
        blocks = self.block_sizes or ()
        if any(size < 1 for size in self.chunk_sizes or ()) or any(not 1 <= size <= 256 for size in blocks):
            raise KilnError("expected chunk sizes of at least 1 token and block sizes from 1 to 256")
        if self.objective == "goodput" and not self.limits:
            raise KilnError("goodput needs a limit: --slo-first-token and --slo-inter-token, or --slo-latency")

    @property
    def limits(self) -> dict[str, float]:
        """All that are set, by name."""
        return self.slo.limits | ({} if self.most_latency is None else {"latency": self.most_latency})


def sizes_for(config: TuneConfig, on_gpu: bool) -> Sizes:
    """The configured sizes, and those that suit the device where none are given."""
    own = ON_GPU if on_gpu else ON_CPU
    return Sizes(
        config.max_batch or own.max_batch,
        own.chunk_sizes if config.chunk_sizes is None else config.chunk_sizes,
        own.block_sizes if config.block_sizes is None else config.block_sizes,
    )
