"""What steps cost, learned from those that ran: so that pieces of prompts can be cut to a time instead of a number.

Two tables of moving averages: seconds of a step that decodes n sequences and nothing else, and seconds that one prompt
token adds, by how many tokens lie before it (attention reads them all). What was never seen is taken from the nearest
entry. Pure Python; the caller measures.
"""

_WEIGHT = 0.2  # of a new observation
_DEPTH = 512  # tokens of context in one entry of the second table
_FIRST_TOKENS = 32  # of a prompt beside decoding, before anything is known
_LEAST_TOKENS = 8


class StepCost:
    """Moving averages of step times in seconds."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}  # by sequences
        self._token: dict[int, float] = {}  # by depth // _DEPTH

    def observe(self, decoding: int, tokens: int, depth: int, seconds: float) -> None:
        """A step of `decoding` sequences and `tokens` prompt tokens, the first at position `depth`, took so long."""
        if not tokens:
            _average(self._decode, decoding, seconds)
        elif not decoding:
            _average(self._token, depth // _DEPTH, seconds / tokens)
        elif self._decode:
            added = max(0.0, seconds - _nearest(self._decode, decoding))
            _average(self._token, depth // _DEPTH, added / tokens)

    def tokens_beside(self, decoding: int, depth: int, stretch: float) -> int:
        """Prompt tokens, the first at position `depth`, with which a step takes `stretch` times as long as without."""
        if not self._decode or not self._token:
            return _FIRST_TOKENS
        room = (stretch - 1) * _nearest(self._decode, decoding)
        return max(_LEAST_TOKENS, int(room / max(_nearest(self._token, depth // _DEPTH), 1e-9)))


def _average(table: dict[int, float], key: int, value: float) -> None:
    table[key] = value if key not in table else table[key] + _WEIGHT * (value - table[key])


def _nearest(table: dict[int, float], key: int) -> float:
    return table[min(table, key=lambda known: abs(known - key))]
