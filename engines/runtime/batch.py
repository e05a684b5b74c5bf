"""One step's work as the scheduler hands it out. Data only."""

from dataclasses import dataclass, field

from engines.runtime.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """`length` tokens of one sequence from `start` on: known ones, then those of `draft`."""

    sequence: Sequence
    start: int
    length: int
    draft: tuple[int, ...] = ()

    rows: int = field(init=False)
    """Logits that are wanted: none unless the chunk has the last known token, then one more than drafted tokens."""

    def __post_init__(self) -> None:
        last = self.known_end == len(self.sequence.token_ids)
        object.__setattr__(self, "rows", 1 + len(self.draft) if last else 0)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def known_end(self) -> int:
        return self.start + self.length - len(self.draft)


Batch = tuple[Chunk, ...]
"""One step: at most one chunk per sequence, decode tokens first."""
