"""Which replica a prompt goes to: the one that knows most of its beginning, unless that one has too much to do.

A prompt is known by the names of its full blocks, which are those of the engine's own prefix cache, so a name that was
sent to a replica stands for a block that it computed. For each replica the names sent there last are remembered, as
many as its cache has blocks, the one used longest ago forgotten first: a mirror of the cache, not its truth.

1. Of the replicas that know at least `worth` of the prompt's blocks and are not overloaded, the one that knows most;
   among equals the least loaded. Overloaded is who has `slack` batches more to do than the least loaded one: what its
   cache saves would be lost by waiting. So loads stay bounded, as in consistent hashing with bounded loads (Mirrokni et
   al., arXiv 1608.01350), but by a difference: a factor of the mean bounds nothing where there are two replicas.
2. Else the least loaded. Among equals the first in the prompt's own order of replicas (rendezvous hashing, Thaler and
   Ravishankar 1998), so that routers that know nothing of each other choose alike; passed over are replicas that were
   given more than `slack_blocks` times the mean of new blocks, so that caches fill evenly.

Pure; knows nothing of Ray.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from engines.runtime.block_pool import BlockHash
from plugins.errors import KilnError

Replica = TypeVar("Replica", bound=Hashable)


@dataclass(frozen=True)
class Member:
    """A replica as a router sees it: requests in the works, how many run at a time, blocks of its cache."""

    load: int
    places: int
    blocks: int


Routing = Literal["prefix", "least-loaded", "round-robin"]


@dataclass(frozen=True)
class RoutingConfig:
    """Raises KilnError for values out of range."""

    policy: Routing = "prefix"
    """The others know nothing of prefixes: they are what this is compared with."""
    worth: float = 0.25
    """Least share of a prompt's blocks for which a replica is preferred: less is learnt by the others soon."""
    slack: float = 1.5
    """Batches that a replica may have to do more than the least loaded one, and still gets requests for its cache."""
    slack_blocks: float = 1.1

    def __post_init__(self) -> None:
        if self.policy not in get_args(Routing):
            raise KilnError(f"routing is by {self.policy!r}; expected one of {', '.join(get_args(Routing))}")
        if not 0 < self.worth <= 1:
            raise KilnError(f"worth is {self.worth}; expected a share above 0 and at most 1")
        if not self.slack > 0:
            raise KilnError(f"slack is {self.slack}; expected batches, more than 0")
        if not self.slack_blocks >= 1:
            raise KilnError(f"slack_blocks is {self.slack_blocks}; expected at least 1")


class _Mirror:
    """Names that one replica was sent, the one used longest ago first, and blocks whose names nobody asks for."""

    def __init__(self) -> None:
        self.names: OrderedDict[BlockHash | int, None] = OrderedDict()
        self._unnamed = 0

    def known(self, names: Sequence[BlockHash]) -> int:
        for count, name in enumerate(names):
            if name not in self.names:
                return count
        return len(names)

    def note(self, names: Sequence[BlockHash], more: int, blocks: int) -> None:
        for _ in range(more):
            self._unnamed += 1
            self.names[self._unnamed] = None
        for name in reversed(names):  # as in the cache, the end of a prefix is forgotten before its beginning
            self.names[name] = None
            self.names.move_to_end(name)
        while len(self.names) > blocks:
            self.names.popitem(last=False)


class PrefixMap(Generic[Replica]):
    """What one router remembers. Not thread-safe: one event loop owns it."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._config = config or RoutingConfig()
        self._mirrors: dict[Replica, _Mirror] = {}
        self._turn = 0

    def known(self, replica: Replica, names: Sequence[BlockHash]) -> int:
        """Leading blocks of a prompt that a replica knows, as far as this router can tell."""
        mirror = self._mirrors.get(replica)
        return 0 if mirror is None else mirror.known(names)

    def ranked(self, names: Sequence[BlockHash], members: Mapping[Replica, Member]) -> list[Replica]:
        """All members, the best one for this prompt first."""
        if self._config.policy == "round-robin":
            return self._in_turn(sorted(members, key=repr))
        order = self._by_load(names, members)
        if self._config.policy == "least-loaded" or not names:
            return order
        known = {replica: self.known(replica, names) for replica in order}
        least = self._config.worth * len(names)
        holders = [r for r in order if known[r] >= least and not self._overloaded(members[r], members)]
        holders.sort(key=lambda replica: -known[replica])  # stable: among equals the least loaded stays first
        return holders + [replica for replica in order if replica not in holders]

    def note(self, replica: Replica, names: Sequence[BlockHash], more: int, blocks: int) -> None:
        """A prompt was sent to a replica whose cache has `blocks`; with its answer it fills `more` than are named."""
        self._mirrors.setdefault(replica, _Mirror()).note(names, more, blocks)

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget those that are gone."""
        for replica in self._mirrors.keys() - set(replicas):
            del self._mirrors[replica]

    def _in_turn(self, order: list[Replica]) -> list[Replica]:
        first = self._turn % max(len(order), 1)
        self._turn += 1
        return order[first:] + order[:first]

    def _overloaded(self, member: Member, members: Mapping[Replica, Member]) -> bool:
        least = min(other.load for other in members.values())
        return member.load - least >= self._config.slack * member.places

    def _by_load(self, names: Sequence[BlockHash], members: Mapping[Replica, Member]) -> list[Replica]:
        filled = {replica: self._filled(replica, member) for replica, member in members.items()}
        most = self._config.slack_blocks * sum(filled.values()) / max(len(filled), 1)
        first = names[0] if names else b""

        def key(replica: Replica) -> tuple[int, bool, bytes]:
            own = hashlib.blake2b(repr(replica).encode(), key=first, digest_size=8).digest()
            return members[replica].load, filled[replica] > most, own

        return sorted(members, key=key)

    def _filled(self, replica: Replica, member: Member) -> float:
        """Share of a replica's cache that this router has filled."""
        mirror = self._mirrors.get(replica)
        return 0.0 if mirror is None else len(mirror.names) / max(member.blocks, 1)
