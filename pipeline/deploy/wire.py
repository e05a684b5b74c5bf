"""What the HTTP side and a replica say to each other. Data only; Ray carries it."""

from dataclasses import dataclass

from engines.runtime.block_pool import BlockHash
from engines.runtime.request import TokenChunk


@dataclass(frozen=True)
class Route:
    """What the router knows of a request. `avoid` are replicas that failed it already."""

    names: tuple[BlockHash, ...] = ()
    """Of the prompt's full blocks (`engines.runtime.prefix_cache`)."""
    more: int = 0
    """Blocks that prompt and answer may fill besides."""
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Accepted:
    """The engine of a replica has taken a request; nothing was generated yet."""

    replica: str


@dataclass(frozen=True)
class Refused:
    """It has not, and this is why."""

    replica: str
    error: Exception


@dataclass(frozen=True)
class Chunks:
    """What came about since the last message: pieces of answers by choice, or why one failed."""

    items: tuple[tuple[int, TokenChunk | Exception], ...]
