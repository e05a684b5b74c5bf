"""How many replicas there should be: as many as the queue and the caches' blocks ask for, or what a roll-out says.

Serve calls the policy about every second with what the replicas report, and adds its own delays and bounds: quickly
up, slowly down. Pure; needs no Ray.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import KilnError

PLACES, BLOCK_USE, WANTED = "kiln_places", "kiln_block_use", "kiln_wanted"
"""What a replica reports: requests that run at a time, `block_use`, and the number that it was told."""


@dataclass(frozen=True)
class ScalingTargets:
    """Use at which there are just enough replicas, as shares. Raises KilnError for values out of range."""

    places: float = 0.8
    """Requests, waiting ones included, for each place in the replicas' batches."""
    blocks: float = 0.8
    """Cache blocks that requests hold, or would if they need not wait."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise KilnError(f"the target of {name} is {value}; expected a share above 0 and at most 1")


@dataclass(frozen=True)
class Load:
    """Of all replicas: `requests` run or wait, `places` of one replica, `block_use` the mean of theirs."""

    replicas: int
    requests: float
    places: float
    block_use: float


def block_use(held: float, blocks: int, running: float, waiting: float) -> float:
    """Share of a replica's cache that its requests hold, or would: one that waits is taken for one of those that run.

    What is held alone says little: an engine lets nobody in who would leave too few blocks for the others to grow.
    """
    return held / blocks * (running + waiting) / running if blocks and running else 0.0


def wanted_replicas(load: Load, targets: ScalingTargets) -> int:
    """The number that brings both uses to their targets, at least 1."""
    by_queue = load.requests / (targets.places * max(load.places, 1))
    by_blocks = load.replicas * load.block_use / targets.blocks
    return max(1, math.ceil(by_queue - 1e-9), math.ceil(by_blocks - 1e-9))


class LoadPolicy:
    """Serve's autoscaling policy, by its path and keyword arguments."""

    def __init__(self, least: int, **targets: float) -> None:
        self._least, self._targets = least, ScalingTargets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext; the second part of the answer is state, of which there is none."""
        series = (context.raw_metrics or {}).get(WANTED, {}).values()
        told = [last for points in series if points and (last := points[-1].value) > 0]  # the newest, no mean
        if told:
            return round(max(told)), {}
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        places, use = (list(reported.get(key, {}).values()) for key in (PLACES, BLOCK_USE))
        if not places:  # nobody has reported yet
            return context.target_num_replicas, {}
        mean_use = sum(use) / max(len(use), 1)
        load = Load(context.current_num_replicas, context.total_num_requests, sum(places) / len(places), mean_use)
        return max(self._least, wanted_replicas(load, self._targets)), {}
