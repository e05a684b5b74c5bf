"""Length strata: into which of a few ranges of token counts a sample or a request falls.

Knows nothing of where lengths come from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from plugins.errors import KilnError

DEFAULT_NAMES = ("short", "medium", "long", "near-limit")
ALL = "all"
_SHORT, _MEDIUM = 64, 512


@dataclass(frozen=True)
class Stratum:
    """Samples of `shortest` to `longest` tokens, both included."""

    name: str
    shortest: int
    longest: int

    def __str__(self) -> str:
        return f"{self.shortest} to {self.longest} tokens"


@dataclass(frozen=True)
class Strata:
    """Adjacent strata, the shortest first: names, and the most tokens of each."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bounds or self.bounds[0] < 1 or any(low >= high for low, high in pairwise(self.bounds)):
            raise KilnError(f"bounds of length strata are {self.bounds}; expected numbers that rise, from 1 on")
        if len(self.names) != len(self.bounds) or len(set(self.names)) != len(self.names):
            raise KilnError(f"strata are {self.names} up to {self.bounds}; expected a name of its own for each bound")

    def __iter__(self) -> Iterator[Stratum]:
        starts = (1, *(bound + 1 for bound in self.bounds))
        return iter(Stratum(*item) for item in zip(self.names, starts, self.bounds, strict=False))

    @property
    def limit(self) -> int:
        """The longest length that belongs to a stratum."""
        return self.bounds[-1]

    @property
    def sized(self) -> bool:
        """Whether lengths tell samples apart at all: they do not for images."""
        return self.names != (ALL,)

    def of(self, length: int) -> str:
        """The stratum's name. Raises KilnError for a length beyond the limit."""
        for name, bound in zip(self.names, self.bounds, strict=True):
            if length <= bound:
                return name
        raise KilnError(f"{length} tokens are more than the {self.limit} that the model takes")


UNSIZED = Strata((ALL,), (2**31 - 1,))
"""One stratum, for data that has no length."""


def strata_of_limit(limit: int) -> Strata:
    """Short, medium, long and near the limit: up to 64, 512, half of `limit` and `limit` tokens.

    The first two are at most an eighth and a quarter of the limit; strata that would be empty are left out.
    """
    if limit < 1:
        raise KilnError(f"the context limit is {limit} tokens; expected at least 1")
    wanted = (min(_SHORT, limit // 8), min(_MEDIUM, limit // 4), limit // 2, limit)
    found: dict[int, str] = {}
    for name, bound in zip(reversed(DEFAULT_NAMES), reversed(wanted), strict=True):
        if bound >= 1:
            found.setdefault(bound, name)
    bounds = sorted(found)
    return Strata(tuple(found[bound] for bound in bounds), tuple(bounds))


def strata_from_text(text: str, limit: int) -> Strata:
    """`64,512,4096` or `chat=512,documents=8192`; the limit joins as the last bound if it is none. Raises KilnError."""
    names, bounds = [], []
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        try:
            bounds.append(int(number))
        except ValueError as error:
            raise KilnError(
                f"length strata are {text!r}; expected bounds in tokens as in 64,512,4096 or chat=512,documents=8192"
            ) from error
        names.append(name.strip() if equals else "")
    if bounds[-1] > limit:
        raise KilnError(f"the last stratum ends at {bounds[-1]} tokens, but the model takes {limit}; lower it")
    if bounds[-1] < limit:
        names, bounds = [*names, ""], [*bounds, limit]
    defaults = DEFAULT_NAMES if len(bounds) == len(DEFAULT_NAMES) else tuple(f"up to {bound}" for bound in bounds)
    return Strata(tuple(name or default for name, default in zip(names, defaults, strict=True)), tuple(bounds))
