"""Connecting to a Ray cluster, and what its nodes have: for rebuilds and for serving. Knows nothing of either.

Machine types are Ray resources: a node that is an H200 machine is started with

    ray start --address HEAD:6379 --resources '{"sku:h200": 1}'

and everything for that SKU goes to a node that has the resource `sku:h200`, be it much or little of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plugins.errors import KilnError, first_line

SLICE = 0.001
"""Of a label: so little that any number of tasks and replicas fits on its node. Ray counts in parts of 1/10000."""


@dataclass(frozen=True)
class Node:
    """`resources` is everything that Ray counts there, used or not."""

    id: str
    address: str
    resources: Mapping[str, float]

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)

    @property
    def skus(self) -> tuple[str, ...]:
        return tuple(name.removeprefix("sku:") for name in self.resources if name.startswith("sku:"))


def label_of(sku: str) -> str:
    """The resource by which nodes of a machine type are found."""
    return f"sku:{sku}"


def ray_module() -> Any:
    """Ray. Any, so that types are checked alike with and without it. Raises KilnError where it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise KilnError("Ray is not installed; install it: pip install 'kiln-engine[ray]'") from error
    return ray


def serve_module() -> Any:
    """Ray Serve. Raises as `ray_module`."""
    ray_module()
    from ray import serve

    return serve


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process is a driver of the cluster; `auto` finds the one that runs here. Raises KilnError.

    Also where the cluster fails what is done with it.
    """
    ray = ray_module()
    if ray.is_initialized():  # the caller's connection, and theirs to end
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", namespace="kiln")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = "that runs here" if address == "auto" else f"at {address}"
        raise KilnError(
            f"there is no Ray cluster {where}: {first_line(error)}; start one (ray start --head), or give the address "
            "of its head: HOST:6379"
        ) from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise KilnError(f"the Ray cluster failed: {first_line(error)}; see ray status, and Ray's logs") from error
    finally:
        ray.shutdown()


def nodes() -> tuple[Node, ...]:
    """Those that are alive."""
    alive = (entry for entry in ray_module().nodes() if entry["Alive"])
    return tuple(Node(entry["NodeID"], entry["NodeManagerAddress"], entry["Resources"]) for entry in alive)


def nodes_of(sku: str, among: Sequence[Node]) -> list[Node]:
    """Those with a machine type's label. Raises KilnError where there is none."""
    found = [node for node in among if label_of(sku) in node.resources]
    if not found:
        known = sorted({name for node in among for name in node.skus})
        raise KilnError(
            f"no node of the Ray cluster has the resource {label_of(sku)}; its {len(among)} nodes have "
            f"{', '.join(map(label_of, known)) or 'no such label'}; start one with: ray start --address HEAD:6379 "
            f"""--resources '{{"{label_of(sku)}": 1}}'"""
        )
    return found
