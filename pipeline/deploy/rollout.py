"""A rolling update, step by step: sizes of both versions, shares of the traffic, and when it goes back.

A step gives the new version a share of the traffic after it has the replicas for it, and the old one gives up as many
as `surge` does not cover, so that a cluster needs little more room than before. A step ends when enough answers of the
new version are known; it goes back as soon as they are clearly worse (`figures.verdict`), when it cannot be judged in
time, or when its replicas do not come up. Pure: time and figures are passed in; `steward` acts on what this says.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from pipeline.deploy.figures import Figures, Limits, Verdict, verdict
from pipeline.deploy.standing import Standing
from plugins.errors import KilnError


@dataclass(frozen=True)
class Side:
    """A version and its share of the traffic."""

    app: str
    share: float


@dataclass(frozen=True)
class Traffic:
    """Which versions serve. The highest `number` is the newest; the first side is the one that is trusted."""

    number: int
    sides: tuple[Side, ...]

    def shared(self, *sides: Side) -> "Traffic":
        """The next one."""
        return Traffic(self.number + 1, sides)


@dataclass(frozen=True)
class Plan:
    """`old` gives way to `new`. `replicas` of the old version when it begins; `surge` more may run meanwhile."""

    old: str
    new: str
    replicas: int
    steps: tuple[float, ...] = (0.1, 0.5, 1.0)
    surge: int = 1
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.steps or self.steps[-1] != 1 or list(self.steps) != sorted(set(self.steps)) or self.steps[0] <= 0:
            raise KilnError(f"the steps are {self.steps}; expected rising shares above 0, the last one 1: 0.1,0.5,1")
        if self.surge < 0 or (self.surge == 0 and self.replicas == 1):
            raise KilnError(
                f"surge is {self.surge} with {self.replicas} replicas; expected at least 1 where a single one must "
                "give way to a new one, else 0 or more"
            )

    def sizes(self, share: float) -> dict[str, int]:
        """Replicas of both at a share of the traffic; the old version keeps one until the end, to go back to."""
        new = min(self.replicas, math.ceil(share * self.replicas - 1e-9))
        new = max(1, min(new, self.replicas + self.surge - 1))
        return {self.old: max(1, min(self.replicas, self.replicas + self.surge - new)), self.new: new}


def under_way(plan: Plan) -> KilnError:
    """What whoever would begin another update is told."""
    return KilnError(f"an update to {plan.new} is under way; wait for it, or end it: kiln deploy ray abort")


Phase = Literal["starting", "judging", "done", "back"]


class Rollout:
    """Where an update stands. `look` is called again and again, about every second."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self.phase: Phase = "starting"
        self.text = "the new version's replicas start"
        self._step, self._since = 0, now
        self._old, self._new = Figures(), Figures()

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "back")

    @property
    def share(self) -> float:
        """Of the traffic, for the new version, now."""
        if self.phase == "back":
            return 0.0
        if self.phase == "done":
            return 1.0
        given = self._step if self.phase == "judging" else self._step - 1
        return self.plan.steps[given] if given >= 0 else 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """Replicas that there should be now."""
        if self.phase == "back":
            return {self.plan.old: self.plan.replicas, self.plan.new: 1}
        if self.phase == "done":
            return {self.plan.old: 1, self.plan.new: self.plan.replicas}
        return self.plan.sizes(self.plan.steps[self._step])

    def observe(self, figures: dict[str, Figures]) -> None:
        """What both versions did since the last time."""
        self._old.add(figures.get(self.plan.old, Figures()))
        self._new.add(figures.get(self.plan.new, Figures()))

    def look(self, now: float, new: Standing) -> None:
        """Go on, wait, or go back; `new` is what Serve says of the new version."""
        if self.ended:
            return
        late = now - self._since > self.plan.limits.patience
        found = verdict(self._old, self._new, self.plan.limits)
        if found.word == "fail":
            self._back(found.text)
        elif self.phase == "starting":
            wanted = self.sizes[self.plan.new]
            if new.failed:
                self._back(f"the new version did not come up: {new.message}")
            elif new.running >= wanted:
                self._begin("judging", now)
            elif late:
                self._back(f"the new version did not come up in time, of {wanted} replicas {new}")
            else:
                self.text = f"of {wanted} replicas of the new version {new}"
        elif not new.running:  # its requests would wait for a replica
            self._back("none of the new version's replicas runs any more")
        elif found.word == "pass":
            self._pass(now, found)
        elif late:
            self._back(f"it could not be judged in time: {found.text}")
        else:
            self.text = f"{self.share:.0%} of the traffic: {found.text}"

    def abort(self, why: str) -> None:
        """Go back, because somebody says so."""
        if not self.ended:
            self._back(why)

    def _begin(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now
        if phase == "judging":
            self._new = Figures()

    def _pass(self, now: float, found: Verdict) -> None:
        self.text = f"passed at {self.share:.0%} of the traffic: {found.text}"
        if self._step + 1 == len(self.plan.steps):
            self._begin("done", now)
        else:
            self._step += 1
            self._begin("starting", now)

    def _back(self, why: str) -> None:
        self.text = f"went back at {self.share:.0%} of the traffic: {why}"
        self.phase = "back"
