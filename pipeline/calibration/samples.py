"""`CalibrationSet`: samples with an origin and a length, drawn from a pool by seed, and a digest of their content.

Knows nothing of files or models.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.calibration.strata import Strata
from plugins.errors import KilnError

Feed = Mapping[str, NDArray]
"""One run's inputs by name; for a decoder `input_ids` [tokens] int32 and nothing else."""

TOKENS = "input_ids"


@dataclass(frozen=True)
class Sample:
    """One run of the model. `read` gives the same every time: what is large, such as an image, is not held."""

    origin: str
    """Where it comes from, such as `prompts.jsonl, line 3`."""
    length: int
    """Tokens; 1 for what has no length."""
    read: Callable[[], Feed]


@dataclass(frozen=True)
class CalibrationSet:
    """Samples in the order in which they are run."""

    origin: str
    samples: tuple[Sample, ...]
    strata: Strata
    sha256: str
    """Of what the samples hold."""

    def stratum_of(self, sample: Sample) -> str:
        return self.strata.of(sample.length)

    @property
    def counts(self) -> dict[str, int]:
        """Samples by stratum, in the strata's order, empty ones included."""
        found = Counter(map(self.stratum_of, self.samples))
        return {name: found[name] for name in self.strata.names}

    @property
    def lengths(self) -> list[int]:
        return [sample.length for sample in self.samples]


@dataclass(frozen=True)
class Draw:
    """How much is taken from each stratum: so many samples, or more where those have fewer tokens than `tokens`."""

    samples: int
    tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.tokens < 0 or self.seed < 0:
            raise KilnError(
                f"{self.samples} samples and {self.tokens} tokens a stratum were asked for, with seed {self.seed}; "
                "expected at least 1, 0 and 0"
            )


def drawn_set(origin: str, pool: Sequence[Sample], strata: Strata, draw: Draw) -> CalibrationSet:
    """Samples of each stratum, the same for the same pool and seed, in the pool's order.

    Raises KilnError for fewer than two samples and for one that is longer than the strata reach.
    """
    if len(pool) < 2:
        found = "no samples" if not pool else f"one sample ({pool[0].origin})"
        raise KilnError(f"the calibration set {origin} holds {found}; expected many that are like the traffic")
    members: dict[str, list[int]] = {name: [] for name in strata.names}
    for index, sample in enumerate(pool):
        try:
            members[strata.of(sample.length)].append(index)
        except KilnError as error:
            raise KilnError(f"{sample.origin}: {error}; shorten it or leave it out") from error
    chosen: list[int] = []
    for number, indices in enumerate(members.values()):
        order = np.random.default_rng([draw.seed, number]).permutation(np.array(indices, int)).tolist()
        tokens = np.cumsum([pool[index].length for index in order])
        count = max(draw.samples, int(np.searchsorted(tokens, draw.tokens)) + 1 if strata.sized else 0)
        chosen += sorted(order[:count])
    samples = tuple(pool[index] for index in chosen)
    return CalibrationSet(origin, samples, strata, _digest(samples))


def _digest(samples: Iterable[Sample]) -> str:
    """SHA-256 of all samples' names, types, shapes and values. Reads each sample, so bad ones are found here."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, array in sorted(sample.read().items()):
            digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update(b"\n")
    return digest.hexdigest()
