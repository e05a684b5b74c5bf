"""Prompt lookup: tokens that may follow are those that followed the last time that the answer's end appeared.

Pure Python over token ids. It costs nothing where nothing repeats: an index of n-grams grows with the tokens, and who
guesses wrong guesses less, and less often. (Saxena, prompt-lookup-decoding; the check is the worker's.)
"""

from collections.abc import Sequence

_ORDERS = (4, 3, 2)
"""Lengths of the ends that are looked up, the longest first; one token alone says too little."""
_LONGEST_PAUSE = 8


class PromptLookup:
    """Drafts for one answer. `propose` sees ever more tokens of the same sequence."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft
        self._length = max_draft
        self._misses = 0
        self._pause_until = 0
        self._seen = 0  # n-grams that end before this position are in the index
        self._after: dict[tuple[int, ...], int] = {}  # n-gram to the position after its latest occurrence

    def propose(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow `token_ids`; often none."""
        end = len(token_ids)
        for position in range(self._seen + 1, end):
            for order in _ORDERS:
                if order <= position:
                    self._after[tuple(token_ids[position - order : position])] = position
        self._seen = max(self._seen, end - 1)
        length = min(self._length, limit)
        if end < self._pause_until or length < 1:
            return ()
        for order in _ORDERS:
            after = self._after.get(tuple(token_ids[max(0, end - order) :]))
            if after is not None:
                followed = tuple(token_ids[after : after + length])
                return (followed * -(-length // len(followed)))[:length]  # what repeats goes on repeating
        return ()

    def record(self, tokens: int, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` tokens `accepted` were right; there are now `tokens` in the sequence."""
        if accepted:
            self._misses = 0
            self._length = min(self.max_draft, 2 * drafted if accepted == drafted else accepted + 1)
        else:
            self._misses += 1
            self._length = max(1, self._length // 2)
            self._pause_until = tokens + min(2 ** (self._misses - 1), _LONGEST_PAUSE)
