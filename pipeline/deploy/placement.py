"""What a replica takes of its node, and how many fit: from the bundle's machine type and the cluster's nodes. Pure.

A GPU's bundle gets one GPU and the CPUs that are given; a CPU's bundle an equal share of its node, one replica for a
node unless told. Nodes with the SKU's label alone are used, unless none of the cluster has a label at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.ray_cluster import SLICE, Node, label_of, nodes_of
from plugins.errors import KilnError


@dataclass(frozen=True)
class Placement:
    """Of one replica; `fitting` is how many the nodes hold now, were they empty. `threads` None: all it may run on."""

    cpus: float
    gpus: float
    fitting: int
    threads: int | None
    label: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Ray's, of an actor."""
        label = {} if self.label is None else {"resources": {self.label: SLICE}}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, **label}


def place(sku: str, on_gpu: bool, among: Sequence[Node], per_node: int = 1, cpus: float | None = None) -> Placement:
    """Raises KilnError where no node can hold a replica.

    `per_node` is of CPU bundles; a GPU holds one. `cpus` of each replica are by default the node's share, and 1 beside
    a GPU.
    """
    if per_node < 1:
        raise KilnError(f"there shall be {per_node} replicas on a node; expected at least 1")
    labelled = any(node.skus for node in among)
    usable = nodes_of(sku, among) if labelled else list(among)
    label = label_of(sku) if labelled else None
    if on_gpu:
        cpus = 1.0 if cpus is None else cpus
        fitting = sum(min(int(node.gpus), int(node.cpus // cpus) if cpus else int(node.gpus)) for node in usable)
        if not fitting:
            raise KilnError(
                f"{sku} needs a GPU and {cpus:g} CPUs for each replica; {_have(usable)}: start nodes with GPUs that "
                "Ray sees, or build the model for a CPU"
            )
        return Placement(cpus, 1.0, fitting, None, label)
    if cpus is None:
        smallest = min((node.cpus for node in usable if node.cpus), default=0.0)
        cpus = smallest // per_node or smallest / per_node
    fitting = sum(min(per_node, int(node.cpus / cpus + 1e-6)) for node in usable) if cpus else 0
    if not fitting:
        raise KilnError(f"a replica needs {cpus:g} CPUs; {_have(usable)}: give --cpus, or start larger nodes")
    return Placement(cpus, 0.0, fitting, max(1, int(cpus)), label)


def _have(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node.address} has {node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in nodes) or "no node"
