"""One step's work as the scheduler hands it out. Data only."""

from dataclasses import dataclass

from engines.runtime.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """`length` tokens of one sequence from `start` on: known ones, then those of `draft`."""

    sequence: Sequence
    start: int
    length: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def known_end(self) -> int:
        return self.end - len(self.draft)

    @property
    def rows(self) -> int:
        """Logits that are wanted: none unless the chunk has the last known token, then one more than drafted tokens.

        To be asked before the step is launched or its tokens are taken: then the sequence has more of them.
        """
        return 1 + len(self.draft) if self.known_end == len(self.sequence.token_ids) else 0


Batch = tuple[Chunk, ...]
"""One step: at most one chunk per sequence, decode tokens first."""
