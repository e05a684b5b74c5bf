"""One small actor per application that outlives its drivers: who gets which share of the traffic, and updates.

The HTTP side's replicas come by every second: they leave what their requests met and take along the traffic's shares.
Engine replicas ask how many of them there shall be, and tell Serve's autoscaling. So an update goes on, and goes back
where it must, also when the command that began it is gone. A steward that was restarted has forgotten everything: it
takes the traffic over from the first who comes by, sizes are by load until somebody says otherwise, and an update that
was under way ends there, with the shares that it had.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pipeline.deploy.figures import Figures
from pipeline.deploy.rollout import Phase, Plan, Rollout, Side, Traffic, under_way
from pipeline.deploy.standing import Standing, standing_of
from pipeline.ray_cluster import ray_module

NAMESPACE = "kiln"
"""Ray's, of stewards."""
SECONDS = 1.0
_LOG = logging.getLogger("kiln.deploy")


@dataclass(frozen=True)
class Report:
    """`figures` are totals since the steward started, by version, in words."""

    traffic: Traffic | None
    figures: dict[str, str]
    plan: Plan | None = None
    phase: Phase | None = None
    text: str = ""

    @property
    def under_way(self) -> bool:
        """Whether there is an update that has not ended."""
        return self.phase in ("starting", "judging")


class Steward:
    """Runs as a Ray actor; its methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self._traffic: Traffic | None = None
        self._sizes: dict[str, int] = {}
        self._totals: dict[str, Figures] = {}
        self._rollout: Rollout | None = None
        self._rolling: asyncio.Task[None] | None = None

    async def exchange(self, known: Traffic | None, figures: dict[str, Figures]) -> Traffic | None:
        """What a replica of the HTTP side knows and met, for what it shall do."""
        if known is not None and (self._traffic is None or known.number > self._traffic.number):
            self._traffic = known
        for app, each in figures.items():
            self._totals.setdefault(app, Figures()).add(each)
        if self._rollout is not None:
            self._rollout.observe(figures)
        return self._traffic

    async def size(self, app: str) -> int:
        """Replicas of a version; 0: as the load demands."""
        return self._sizes.get(app, 0)

    async def tell(self, app: str, size: int) -> None:
        """Set that number."""
        self._sizes[app] = size

    async def direct(self, app: str) -> None:
        """All traffic to one version, from now on."""
        self._share(Side(app, 1.0))

    async def begin(self, plan: Plan) -> None:
        """Begin an update. Raises KilnError while another one is under way."""
        if self._rollout is not None and not self._rollout.ended:
            raise under_way(self._rollout.plan)
        self._rollout = Rollout(plan, time.monotonic())
        self._sizes |= self._rollout.sizes
        self._rolling = asyncio.create_task(self._roll(self._rollout))

    async def abort(self, why: str) -> bool:
        """Go back; whether there was something to go back from."""
        rollout = self._rollout
        if rollout is None or rollout.ended:
            return False
        rollout.abort(why)
        self._apply(rollout)
        return True

    async def report(self) -> Report:
        figures = {app: each.sentence() for app, each in self._totals.items()}
        found, rollout = Report(self._traffic, figures), self._rollout
        return found if rollout is None else replace(found, plan=rollout.plan, phase=rollout.phase, text=rollout.text)

    async def forget(self, app: str) -> None:
        """A version that is gone."""
        self._sizes.pop(app, None)
        self._totals.pop(app, None)

    async def _roll(self, rollout: Rollout) -> None:
        while not rollout.ended:
            try:
                found = await asyncio.to_thread(standing_of, rollout.plan.new)
                rollout.look(time.monotonic(), found or Standing())
            except Exception as error:  # Serve's controller may be away for a moment
                _LOG.warning("the update cannot be looked at: %s", error)
            self._apply(rollout)
            await asyncio.sleep(SECONDS)

    def _apply(self, rollout: Rollout) -> None:
        plan, share = rollout.plan, rollout.share
        self._sizes |= rollout.sizes
        old, new = Side(plan.old, 1 - share), Side(plan.new, share)
        sides = tuple(side for side in ((new, old) if share == 1 else (old, new)) if side.share > 0)
        if self._traffic is None or self._traffic.sides != sides:
            self._share(*sides)

    def _share(self, *sides: Side) -> None:
        self._traffic = Traffic(1, sides) if self._traffic is None else self._traffic.shared(*sides)


def name_of(app: str) -> str:
    """A steward's name."""
    return f"steward-{app}"


def start_steward(app: str) -> Any:
    """The steward of an application, started where there is none; Ray's handle of it."""
    ray = ray_module()
    steward_of.cache_clear()  # there may have been another one of that name
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3, max_concurrency=1000)(Steward)
    return actor.options(name=name_of(app), namespace=NAMESPACE, lifetime="detached", get_if_exists=True).remote()


@cache
def steward_of(app: str) -> Any:
    """Ray's handle of a steward that was started. Raises ValueError where there is none."""
    ray = ray_module()

    return ray.get_actor(name_of(app), namespace=NAMESPACE)


async def size_told(steward: str, app: str) -> float:
    """Replicas that a version shall have; 0: as the load demands."""
    return float(await steward_of(steward).size.remote(app))
