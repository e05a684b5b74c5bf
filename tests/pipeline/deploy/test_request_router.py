"""What Serve's router base expects of ours; needs Ray, but no cluster."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.deploy import request_router
from pipeline.deploy.request_router import BLOCKS, PLACES
from pipeline.deploy.wire import Route


@dataclass
class Replica:
    """The part of Serve's RunningReplica that is read."""

    name: str
    replica_metadata: dict[str, int] = field(default_factory=lambda: {PLACES: 4, BLOCKS: 8})

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)


def test_each_replica_is_a_rank_and_a_full_cluster_is_asked_again_after_a_pause():
    """Without `should_backoff` the base asks again at once, for as long as all replicas are full."""
    pytest.importorskip("ray")
    kind = request_router.PrefixRouter
    router = object.__new__(type("Alone", (kind,), {"replica_queue_len_cache": SimpleNamespace(get=lambda _: 1)}))
    router.initialize_state()
    ranks, asked = asyncio.run(chosen(router, Route((b"name",), avoid=frozenset({"a"}))))
    assert [[replica.name for replica in rank] for rank in ranks] == [["b"], ["a"]]
    assert asked.routing_context.should_backoff


async def chosen(router: Any, route: Route) -> tuple[Any, Any]:
    from ray.serve.request_router import PendingRequest

    asked = PendingRequest(args=[route], kwargs={}, metadata=None)
    return await router.choose_replicas([Replica("a"), Replica("b")], asked), asked
