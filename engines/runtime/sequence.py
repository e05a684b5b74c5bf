"""The state of one sequence while it waits or runs: tokens, blocks, and how much of it is in the cache.

Pure Python: no tensors, no text, no sampling. The scheduler moves it; `packing` turns it into arrays.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Literal

Lane = Literal["interactive", "batch"]
LANES: tuple[Lane, ...] = ("interactive", "batch")
"""From the one that goes first."""


class Sequence:
    """Tokens and cache state of one request.

    Invariants: `computed <= len(token_ids)`; while it runs, `blocks` cover every position that is computed or in the
    next step. Where steps are launched ahead, a position counts as computed from the launch on, and the tokens that
    such a step chooses stand in `token_ids` without their value: the last `unknown` ones.
    """

    __slots__ = (
        "arrival",
        "block_names",
        "blocks",
        "computed",
        "deadline",
        "draft",
        "host_blocks",
        "id",
        "in_flight",
        "lane",
        "max_tokens",
        "preemptions",
        "prompt_length",
        "salt",
        "saved",
        "token_ids",
        "unknown",
    )

    def __init__(
        self,
        id: int,
        prompt: SequenceOf[int],
        max_tokens: int,
        *,
        lane: Lane = "interactive",
        arrival: float = 0.0,
        deadline: float | None = None,
        salt: bytes = b"",
    ) -> None:
        assert prompt
        assert max_tokens >= 1
        self.id = id
        self.token_ids = array("i", prompt)  # prompt and generated tokens, int32
        self.prompt_length = len(prompt)
        self.max_tokens = max_tokens
        self.lane = lane
        self.arrival = arrival  # seconds of the scheduler's clock
        self.deadline = deadline  # likewise; None: none
        self.salt = salt  # of its tenant: prefixes are shared within one only
        self.computed = 0  # leading tokens whose keys and values are in the cache
        self.blocks = array("i")  # blocks[p // block_size] holds position p; empty while waiting
        self.block_names: list[bytes] = []  # of the leading full blocks, as far as they were needed
        self.preemptions = 0
        self.draft: tuple[int, ...] = ()  # tokens that may follow; the next step may compute them along
        self.host_blocks = array("i")  # of its cache content, while it waits
        self.saved = 0  # leading tokens whose keys and values are in host_blocks
        self.in_flight = 0  # launched steps that write to its blocks
        self.unknown = 0  # tokens at the end that launched steps choose

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that are known but not yet in the cache: 1 when decoding, more in a prompt or after preemption."""
        return len(self.token_ids) - self.computed

    @property
    def decoding(self) -> bool:
        """Something was generated, and the last token is the only one pending."""
        known = len(self.token_ids)
        return known - self.computed == 1 and known > self.prompt_length

    @property
    def resumes(self) -> bool:
        """Whether it has run already, itself or as part of the sequence that it was forked from."""
        return self.preemptions > 0 or self.generated > 0

    @property
    def used_up(self) -> bool:
        """All of its tokens are there and known."""
        return len(self.token_ids) - self.prompt_length - self.unknown >= self.max_tokens

    @property
    def awaits_end(self) -> bool:
        """Its last token is being chosen: no step takes it any more."""
        return len(self.token_ids) - self.prompt_length >= self.max_tokens

    @property
    def cached_length_limit(self) -> int:
        """Most positions that the cache ever holds: the last token to be generated is never fed back."""
        return self.prompt_length + self.max_tokens - 1

    def append(self, token: int) -> None:
        """Add a sampled token. Only when everything before it is computed, and while some are left to generate."""
        if self.pending or self.used_up:
            raise ValueError(f"sequence {self.id} cannot take a token: {self.pending} pending, {self.generated} made")
        self.token_ids.append(token)

    def expect(self) -> None:
        """Make room for the token that a launched step chooses."""
        assert len(self.token_ids) == self.computed
        self.token_ids.append(0)
        self.unknown += 1

    def learn(self, token: int) -> None:
        """Note the first of the tokens that were expected."""
        self.token_ids[len(self.token_ids) - self.unknown] = token
        self.unknown -= 1


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold `positions` tokens."""
    return -(-positions // block_size)
