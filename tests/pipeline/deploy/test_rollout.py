"""When an update goes on and when it goes back. No Ray."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.deploy.figures import Figures, Limits, verdict
from pipeline.deploy.rollout import Plan, Rollout, Side, Traffic
from pipeline.deploy.standing import Standing
from pipeline.order_statistics import binomial_below, quantile_bounds
from plugins.errors import KilnError


def met(requests: int, failures: int = 0, seconds: float = 0.01, seed: int = 0) -> Figures:
    """Answers whose latency varies by a fifth."""
    figures, noise = Figures(), random.Random(seed)
    for number in range(requests):
        if number < failures:
            figures.failed()
        else:
            figures.answered(seconds * noise.uniform(0.9, 1.1) * 10, 10)
    return figures


# The verdict


@given(st.integers(0, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_binomial_sums_to_one_and_rises(successes, trials, probability):
    assert binomial_below(trials + 1, trials, probability) == pytest.approx(1)
    assert binomial_below(successes, trials, probability) <= binomial_below(successes + 1, trials, probability) + 1e-12


def test_binomial_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    for successes, trials, probability in ((0, 10, 0.3), (3, 10, 0.3), (40, 2000, 0.02), (2000, 2000, 0.95)):
        expected = stats.binom.cdf(successes - 1, trials, probability)
        assert binomial_below(successes, trials, probability) == pytest.approx(expected, abs=1e-12)


def test_bounds_of_a_quantile_hold_as_often_as_they_say():
    noise, misses = random.Random(1), [0, 0]
    for _ in range(400):
        low, high = quantile_bounds(sorted(noise.random() for _ in range(60)), 0.5, 0.9)
        misses[0] += low is not None and low > 0.5
        misses[1] += high is not None and high < 0.5
    assert all(0 < count < 0.15 * 400 for count in misses)  # 0.1 expected of each; 0.15 is 3.3 standard deviations off


def test_too_few_values_bound_nothing():
    assert quantile_bounds([], 0.5, 0.99) == (None, None)
    assert quantile_bounds([1.0, 2.0], 0.95, 0.999) == (None, None)


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_a_version_like_the_old_one_passes(seed):
    found = verdict(met(500, 1, seed=seed), met(100, 0, seed=seed + 1), Limits())
    assert found.word == "pass"


@pytest.mark.parametrize(
    ("new", "says"),
    [(met(60, 12), "12 of 60 requests failed, 1 of 500"), (met(200, 0, 0.02), "latency is above .* 25% more")],
)
def test_a_worse_version_fails_and_says_by_what(new, says):
    found = verdict(met(500, 1), new, Limits())
    assert found.word == "fail"
    import re

    assert re.search(says, found.text)


def test_a_failure_that_chance_explains_is_no_verdict():
    assert verdict(met(100), met(10, 1), Limits()).word == "wait"
    assert verdict(met(100), met(60, 1), Limits()).word == "pass"


def test_a_dead_version_fails_long_before_a_step_is_full():
    assert verdict(met(100), met(4, 4), Limits(requests=1000)).word == "fail"


# The update


def up(running: int) -> Standing:
    return Standing("RUNNING", running)


PLAN = Plan("old", "new", 4, (0.25, 0.5, 1.0), 1, Limits(requests=20, patience=60))


def drive(rollout: Rollout, old: Figures, new: Figures, seconds: int = 100) -> list[float]:
    """Looks every second, with replicas that come up at once; the shares that it had."""
    shares = []
    for now in range(seconds):
        shares.append(rollout.share)
        if rollout.share:
            rollout.observe({"new": new})
        rollout.observe({"old": old})
        rollout.look(float(now), up(rollout.sizes["new"]))
        if rollout.ended:
            break
    return list(dict.fromkeys(shares))


def test_a_good_version_gets_all_traffic_step_by_step():
    rollout = Rollout(PLAN, 0.0)
    assert drive(rollout, met(10), met(5)) == [0.0, 0.25, 0.5, 1.0]
    assert rollout.phase == "done"
    assert rollout.sizes == {"old": 1, "new": 4}


def test_a_bad_version_goes_back_at_the_first_step():
    rollout = Rollout(PLAN, 0.0)
    assert drive(rollout, met(10), met(5, 5)) == [0.0, 0.25]
    assert rollout.phase == "back"
    assert rollout.share == 0
    assert rollout.sizes["old"] == 4
    assert "went back at 25% of the traffic" in rollout.text


def test_without_traffic_it_goes_back_when_its_time_is_over():
    rollout = Rollout(PLAN, 0.0)
    drive(rollout, Figures(), Figures())
    assert rollout.phase == "back"
    assert "could not be judged in time: 0 of 20 requests" in rollout.text


def test_replicas_that_do_not_come_up_get_no_traffic():
    rollout = Rollout(PLAN, 0.0)
    for now in range(62):
        assert rollout.share == 0
        rollout.look(float(now), up(0))
    assert "did not come up in time, of 1 replicas 0 run" in rollout.text


def test_a_version_that_cannot_be_opened_goes_back_at_once_and_says_why():
    rollout = Rollout(PLAN, 0.0)
    rollout.look(1.0, Standing("DEPLOYING", 0, "no CPU is free"))
    assert (rollout.phase, rollout.text) == ("starting", "of 1 replicas of the new version 0 run; no CPU is free")
    rollout.look(2.0, Standing("DEPLOY_FAILED", 0, "KilnError: it was rebuilt"))
    assert rollout.phase == "back"
    assert "did not come up: KilnError: it was rebuilt" in rollout.text


def test_a_version_whose_replicas_are_all_gone_goes_back():
    rollout = Rollout(PLAN, 0.0)
    rollout.look(0.0, up(1))
    assert (rollout.phase, rollout.share) == ("judging", 0.25)
    rollout.look(1.0, up(0))
    assert rollout.phase == "back"
    assert "none of the new version's replicas runs" in rollout.text


def test_failures_count_also_while_the_next_replicas_start():
    rollout = Rollout(PLAN, 0.0)
    rollout.look(0.0, up(1))
    rollout.observe({"old": met(50), "new": met(20)})
    rollout.look(1.0, up(1))
    assert (rollout.phase, rollout.share) == ("starting", 0.25)
    rollout.observe({"new": met(30, 30)})
    rollout.look(2.0, up(1))
    assert rollout.phase == "back"


def test_somebody_may_end_it():
    rollout = Rollout(PLAN, 0.0)
    rollout.abort("somebody ended it")
    assert rollout.phase == "back"
    rollout.abort("again")
    assert "again" not in rollout.text


@given(st.integers(1, 40), st.integers(0, 5), st.floats(0.001, 1))
def test_sizes_stay_within_the_surge_and_leave_both_versions_one(replicas, surge, share):
    if surge == 0 and replicas == 1:
        return
    sizes = Plan("old", "new", replicas, (1.0,), surge).sizes(share)
    assert sizes["old"] >= 1
    assert sizes["new"] >= 1
    assert sizes["old"] + sizes["new"] <= max(replicas + surge, 2)
    assert sizes["old"] <= replicas


@pytest.mark.parametrize("steps", [(), (0.5,), (0.5, 0.2, 1.0), (0.0, 1.0), (0.5, 0.5, 1.0)])
def test_steps_must_rise_to_everything(steps):
    with pytest.raises(KilnError, match="expected rising shares"):
        Plan("old", "new", 2, steps)


def test_one_replica_cannot_give_way_without_room():
    with pytest.raises(KilnError, match="surge is 0 with 1 replicas"):
        Plan("old", "new", 1, surge=0)


@pytest.mark.parametrize("limits", [{"errors": 1.0}, {"latency": -1}, {"requests": 0}, {"confidence": 0.5}])
def test_limits_out_of_range(limits):
    with pytest.raises(KilnError, match="expected"):
        Limits(**limits)


def test_traffic_is_numbered():
    assert Traffic(3, (Side("a", 1.0),)).shared(Side("b", 1.0)) == Traffic(4, (Side("b", 1.0),))
