"""Choosing a plan: within its limits whatever the layers cost, and no less than what is easily had."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from passes.quantization.plan import LayerPlan, PrecisionPlan, plan_from_toml
from pipeline.quantize.choose import Choice, choose
from pipeline.quantize.judge import Difference
from plugins.errors import KilnError

INT8, INT4 = LayerPlan("w8a8-dynamic"), LayerPlan("w4a8-dynamic", group_size=32)
LIMITS = {"short": 1.0, "long": 1.0}


def choice(layer: str, plan: LayerPlan, short: float, long: float, saved: float) -> Choice:
    return Choice(layer, plan, {"short": short, "long": long}, saved)


def measure_as(choices: list[Choice], factor: float = 1.0):
    """Costs add up, times a factor that the single layers did not foretell."""
    costs = {(choice.layer, choice.plan): choice.cost for choice in choices}

    def measure(plan: PrecisionPlan) -> dict[str, Difference]:
        chosen = [costs[name, replace(plan.of(name), reason="")] for name in plan.quantised]
        return {s: Difference(error=0.0, kl=factor * sum(cost[s] for cost in chosen)) for s in LIMITS}

    return measure


def test_the_sensitive_layer_stays_and_the_reason_is_said():
    choices = [choice("a", INT8, 0.1, 0.1, 1.0), choice("b", INT8, 0.1, 5.0, 1.0), choice("c", INT8, 0.1, 0.1, -1.0)]
    chosen = choose("m", choices, LIMITS, measure_as(choices))
    assert chosen.plan.quantised == ("a",)
    assert chosen.plan.of("b").reason == "too sensitive"
    assert chosen.plan.of("c").reason == "not faster here"
    assert chosen.cost == {"short": 0.1, "long": 0.1}
    assert chosen.saved == 1.0


def test_a_layer_falls_back_to_its_next_choice():
    choices = [choice("a", INT4, 0.2, 2.0, 3.0), choice("a", INT8, 0.1, 0.1, 2.0), choice("b", INT4, 0.1, 0.1, 1.0)]
    chosen = choose("m", choices, LIMITS, measure_as(choices))
    assert [chosen.plan.of(name).scheme for name in "ab"] == ["w8a8-dynamic", "w4a8-dynamic"]


def test_what_the_sums_did_not_foretell_is_measured():
    choices = [choice(f"layer{number}", INT8, 0.09, 0.05, 1.0 + number / 100) for number in range(10)]
    chosen = choose("m", choices, LIMITS, measure_as(choices, factor=3.0))
    assert 1 <= len(chosen.plan.quantised) <= 3
    assert chosen.cost["short"] <= 1


def test_a_plan_that_costs_nothing_is_taken():
    choices = [choice("a", INT8, 0.0, 0.0, 1.0)]
    assert choose("m", choices, LIMITS, measure_as(choices)).plan.quantised == ("a",)


@pytest.mark.parametrize("choices", [[], [choice("a", INT8, 9, 9, 1.0)], [choice("a", INT8, 0, 0, -1.0)]])
def test_nothing_within_the_limits_is_an_error(choices):
    with pytest.raises(KilnError, match="no plan that saves time is within the limits short 1, long 1"):
        choose("m", choices, LIMITS, measure_as(choices))


COSTS = st.floats(0, 2)


@example([(0.0, 0.0, 0.0, 0.0625, 0.0, 0.015625), (0.0, 2.0, 0.0, 0.0, 1.0, 0.0), *[(0.0,) * 6] * 3], 0.5)
@given(
    st.lists(st.tuples(COSTS, COSTS, COSTS, COSTS, st.floats(-1, 3), st.floats(-1, 3)), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 2.5]),
)
def test_limits_hold_and_nothing_slower_is_chosen(layers, factor):
    choices = [
        choice(f"layer{number}", plan, short, long, saved)
        for number, (a, b, c, d, first, second) in enumerate(layers)
        for plan, short, long, saved in ((INT8, a, b, first), (INT4, c, d, second))
    ]
    try:
        chosen = choose("m", choices, LIMITS, measure_as(choices, factor))
    except KilnError:
        cheap = [c for c in choices if c.saved > 0 and max(c.cost.values()) * max(factor, 1) <= 0.5 / len(layers)]
        assert not cheap, "such a layer alone would do"
        return
    assert all(cost <= 1 for cost in chosen.cost.values())
    saved = {(c.layer, c.plan): c.saved for c in choices}
    taken = [saved[name, replace(chosen.plan.of(name), reason="")] for name in chosen.plan.quantised]
    assert all(value > 0 for value in taken)
    assert chosen.saved == pytest.approx(sum(taken))


def test_a_plan_survives_its_file(tmp_path):
    choices = [choice("model.layers.0.q+k", INT4, 0.2, 0.3, 3.0), choice("b", INT8, 5, 5, 1.0)]
    plan = choose("0123", choices, LIMITS, measure_as(choices)).plan
    plan = replace(plan, kv="int8-k", origin={"sku": "cpu-avx512"})
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    assert plan_from_toml(path) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_sha256 = ", "cannot be read"),
        ("layers = {}", "field 'model_sha256': Field required"),
        ('model_sha256 = "m"\n[layers.a]\nscheme = "int3"', "field 'layers.a.scheme'.*'int3'"),
        ('model_sha256 = "m"\n[layers.a]\nscheem = "float"', "field 'layers.a.scheem'"),
        ('model_sha256 = "m"\n[layers.a]\ngroup_size = -1', "group_size is -1"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(KilnError, match=message):
        plan_from_toml(tmp_path / "plan.toml")
