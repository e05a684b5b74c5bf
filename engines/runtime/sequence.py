"""The state of one sequence while it waits or runs: tokens, blocks, and how much of it is in the cache.

Pure Python: no tensors, no text, no sampling. The scheduler moves it; `packing` turns it into arrays.
"""

from array import array
from collections.abc import Sequence as SequenceOf


class Sequence:
    """Tokens and cache state of one request.

    Invariants: `computed <= len(token_ids)`, and blocks cover every position that is or will be computed.
    """

    __slots__ = ("blocks", "computed", "id", "max_tokens", "prompt_length", "token_ids")

    def __init__(self, id: int, prompt: SequenceOf[int], max_tokens: int) -> None:
        assert prompt
        assert max_tokens >= 1
        self.id = id
        self.token_ids = array("i", prompt)  # prompt and generated tokens, int32
        self.prompt_length = len(prompt)
        self.max_tokens = max_tokens
        self.computed = 0  # leading tokens whose keys and values are in the cache
        self.blocks = array("i")  # blocks[p // block_size] holds position p; empty while waiting

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that are known but not yet in the cache: 1 when decoding, more in a prompt."""
        return len(self.token_ids) - self.computed

    @property
    def decoding(self) -> bool:
        """The whole prompt is computed and the last sampled token is the only one pending."""
        return self.computed >= self.prompt_length

    @property
    def used_up(self) -> bool:
        return self.generated >= self.max_tokens

    @property
    def cached_length_limit(self) -> int:
        """Most positions that the cache ever holds: the last token to be generated is never fed back."""
        return self.prompt_length + self.max_tokens - 1

    def append(self, token: int) -> None:
        """Add a sampled token. Only when everything before it is computed, and while some are left to generate."""
        if self.pending or self.used_up:
            raise ValueError(f"sequence {self.id} cannot take a token: {self.pending} pending, {self.generated} made")
        self.token_ids.append(token)


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold `positions` tokens."""
    return -(-positions // block_size)
