"""Ray Serve's request router of engine replicas: asks `PrefixMap`, with what Serve knows of the replicas' load.

The class is made when it is first asked for, because its base is Ray's: `PrefixRouter` is an attribute of this module
wherever Ray is installed. Serve gives every handle a router of its own, so each replica of the HTTP side has one.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.deploy.prefixes import Member, PrefixMap, RoutingConfig
from pipeline.deploy.wire import Route

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

PATH = f"{__name__}:PrefixRouter"
PLACES, BLOCKS = "places", "blocks"
"""Keys of what a replica publishes about itself, once, when it is ready."""


def __getattr__(name: str) -> Any:
    if name == "PrefixRouter":
        return _router_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def route_of(request: "PendingRequest | None") -> Route:
    """The Route among a call's arguments; an empty one for calls that have none."""
    arguments = () if request is None else (*request.args, *request.kwargs.values())
    return next((value for value in arguments if isinstance(value, Route)), Route())


@cache
def _router_class() -> type:
    from ray.serve.request_router import RequestRouter

    class PrefixRouter(RequestRouter):
        """One handle's router."""

        def initialize_state(self, **config: Any) -> None:
            self._map: PrefixMap[str] = PrefixMap(RoutingConfig(**config))

        async def choose_replicas(
            self, candidate_replicas: "list[RunningReplica]", pending_request: "PendingRequest | None" = None
        ) -> "list[list[RunningReplica]]":
            """Each a rank of its own: a full one is passed over for the next."""
            if pending_request is not None:  # or the base asks again without a pause while all replicas are full
                pending_request.routing_context.should_backoff = True
            route = route_of(pending_request)
            replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
            members = {name: self._member(each) for name, each in replicas.items()}
            order = self._map.ranked(route.names, members)
            order.sort(key=lambda name: name in route.avoid)
            if order and route.names:  # at once: the next prompt may begin alike before this one has arrived
                self._map.note(order[0], route.names, 0, members[order[0]].blocks)
            return [[replicas[name]] for name in order]

        def on_request_routed(self, pending_request: "PendingRequest", replica_id: "ReplicaID", result: Any) -> None:
            """It may be another one than the first choice."""
            route, replica = route_of(pending_request), self.curr_replicas.get(replica_id)
            if route.names and replica is not None:
                self._map.note(replica_id.unique_id, route.names, route.more, self._member(replica).blocks)

        def update_replicas(self, replicas: "list[RunningReplica]") -> None:
            super().update_replicas(replicas)
            self._map.keep([each.replica_id.unique_id for each in replicas])

        def _member(self, replica: "RunningReplica") -> Member:
            facts = replica.replica_metadata
            load = self.replica_queue_len_cache.get(replica.replica_id) or 0
            return Member(load, facts.get(PLACES, 1), facts.get(BLOCKS, 0))

    return PrefixRouter
