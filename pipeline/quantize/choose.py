"""From what layers cost and save to a plan: as much time saved as the accuracy limits allow.

Costs of layers add up roughly (their errors are small and of random sign), so the choice starts from the sums; then the
whole plan is measured, and where it costs more than the sum foretold, the next choice gets so much less to spend.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.quantization.plan import LayerPlan, PrecisionPlan
from pipeline.quantize.judge import Difference, Stratum
from pipeline.quantize.sensitivity import Finding
from plugins.errors import KilnError

_ROUNDS = 6


@dataclass(frozen=True)
class Choice:
    """One layer with one plan: what it costs by stratum, and the seconds that it saves over the workload."""

    layer: str
    plan: LayerPlan
    cost: Mapping[Stratum, float]
    saved: float


@dataclass(frozen=True)
class Chosen:
    """A plan, what it was found to cost by stratum, and the seconds that its layers save by themselves."""

    plan: PrecisionPlan
    cost: Mapping[Stratum, float]
    saved: float


def choice_from_finding(finding: Finding, saved: float) -> Choice:
    cost = {stratum: cost_of(difference) for stratum, difference in finding.differences.items()}
    return Choice(finding.layer, finding.plan, cost, saved)


def cost_of(difference: Difference) -> float:
    """What adds up over layers: KL divergence, or the squared error where there is none."""
    return difference.error**2 if difference.kl is None else difference.kl


def choose(
    model_sha256: str,
    choices: Sequence[Choice],
    limits: Mapping[Stratum, float],
    measure: Callable[[PrecisionPlan], Mapping[Stratum, Difference]],
) -> Chosen:
    """The plan that saves most and costs at most `limits`, as `measure` finds.

    `limits` are above 0, one for each stratum. Layers keep `float` where no choice saves time. Raises KilnError where
    no plan that saves time is within the limits.
    """
    useful = [choice for choice in choices if choice.saved > 0]
    budget = dict(limits)
    for _ in range(_ROUNDS):
        kept = _within(useful, budget)
        if not kept:
            break
        plan = _plan(model_sha256, kept, choices)
        cost = {stratum: cost_of(difference) for stratum, difference in measure(plan).items()}
        excess = {stratum: cost[stratum] / limit for stratum, limit in limits.items()}
        if max(excess.values()) <= 1:
            return Chosen(plan, cost, sum(choice.saved for choice in kept))
        spent = _sum(kept, limits)
        budget |= {s: min(budget[s], spent[s]) / times * 0.95 for s, times in excess.items() if times > 1}
    raise KilnError(
        f"no plan that saves time is within the limits {_in_words(limits)}: {len(useful)} of {len(choices)} layers' "
        "choices are faster than float here; raise the limits, offer another scheme, or leave the model as it is"
    )


def _within(choices: Sequence[Choice], budget: Mapping[Stratum, float]) -> list[Choice]:
    """One choice for each layer at most. The costliest for what it saves gives way first, to the layer's next one.

    What is beyond the budget by itself is left out at once, so that nothing gives way to it.
    """
    by_layer: dict[str, list[Choice]] = {}
    for choice in sorted(choices, key=lambda choice: -choice.saved):
        if _burden(choice, budget) <= 1:
            by_layer.setdefault(choice.layer, []).append(choice)
    taken = {layer: options.pop(0) for layer, options in by_layer.items()}
    while taken and any(cost > budget[stratum] for stratum, cost in _sum(taken.values(), budget).items()):
        worst = max(taken.values(), key=lambda choice: _burden(choice, budget) / choice.saved)
        options = [option for option in by_layer[worst.layer] if _burden(option, budget) < _burden(worst, budget)]
        by_layer[worst.layer] = options[1:]
        if options:
            taken[worst.layer] = options[0]
        else:
            del taken[worst.layer]
    return list(taken.values())


def _burden(choice: Choice, budget: Mapping[Stratum, float]) -> float:
    return max(choice.cost[stratum] / max(limit, 1e-30) for stratum, limit in budget.items())


def _sum(choices: Iterable[Choice], strata: Mapping[Stratum, float]) -> dict[Stratum, float]:
    choices = list(choices)
    return {stratum: sum(choice.cost[stratum] for choice in choices) for stratum in strata}


def _plan(model_sha256: str, kept: Sequence[Choice], choices: Sequence[Choice]) -> PrecisionPlan:
    """In the order of the choices, each layer with the reason for what it gets."""
    chosen = {choice.layer: choice for choice in kept}
    layers: dict[str, LayerPlan] = {}
    for choice in choices:
        if choice.layer in layers:
            continue
        if (taken := chosen.get(choice.layer)) is not None:
            reason = f"saves {taken.saved * 1e3:.3g} ms, costs {max(taken.cost.values()):.2g}"
            layers[choice.layer] = replace(taken.plan, reason=reason)
        else:
            slower = all(option.saved <= 0 for option in choices if option.layer == choice.layer)
            layers[choice.layer] = LayerPlan(reason="not faster here" if slower else "too sensitive")
    return PrecisionPlan(model_sha256, layers)


def _in_words(limits: Mapping[Stratum, float]) -> str:
    return ", ".join(f"{stratum} {limit:.2g}" for stratum, limit in limits.items())
