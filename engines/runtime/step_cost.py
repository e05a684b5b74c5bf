"""What steps cost, learned from those that ran: so that pieces of prompts can be cut to a time instead of a number.

Two tables of moving averages: seconds of a step that decodes n sequences and nothing else, and seconds that one prompt
token adds, by how many tokens lie before it (attention reads them all). What was never seen is taken from the nearest
entry. Pure Python; the caller measures.
"""

_WEIGHT = 0.2  # of a new observation
_DEPTH = 512  # tokens of context in one entry of the second table
_FIRST_TOKENS = 32  # of a prompt beside decoding, before anything is known
_LEAST_TOKENS = 8
_SHORTEST = 1e-6  # seconds; noise can make averages smaller, even negative


class StepCost:
    """Moving averages of step times in seconds."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}  # by sequences
        self._added: dict[int, float] = {}  # by depth // _DEPTH: seconds that prompt tokens added to a step,
        self._tokens: dict[int, float] = {}  # and how many they were

    def observe(self, decoding: int, tokens: int, depth: int, seconds: float) -> None:
        """A step of `decoding` sequences and `tokens` prompt tokens, the first at position `depth`, took so long."""
        if not tokens:
            _average(self._decode, decoding, seconds)
        elif self._decode or not decoding:
            # Averages of both, not of their ratio: a few tokens of a noisy step must not count like many.
            added = seconds - (_nearest(self._decode, decoding) if decoding else 0.0)
            _average(self._added, depth // _DEPTH, added)
            _average(self._tokens, depth // _DEPTH, tokens)

    def tokens_beside(self, decoding: int, depth: int, stretch: float) -> int:
        """Prompt tokens, the first at position `depth`, with which a step takes `stretch` times as long as without."""
        if not self._decode or not self._added:
            return _FIRST_TOKENS
        room = (stretch - 1) * _nearest(self._decode, decoding)
        added, tokens = (_nearest(table, depth // _DEPTH) for table in (self._added, self._tokens))
        return max(_LEAST_TOKENS, int(room * tokens / max(added, _SHORTEST)))


def _average(table: dict[int, float], key: int, value: float) -> None:
    table[key] = value if key not in table else table[key] + _WEIGHT * (value - table[key])


def _nearest(table: dict[int, float], key: int) -> float:
    return table[min(table, key=lambda known: abs(known - key))]
