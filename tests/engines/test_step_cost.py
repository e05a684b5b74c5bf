"""What the scheduler learns about steps, from simulated ones."""

import random

import pytest

from engines.runtime.step_cost import StepCost


def seconds(decoding: int, tokens: int, depth: int) -> float:
    """A machine where a prompt token costs twice as much 2000 tokens into a context as at its beginning."""
    return 0.020 + 0.001 * decoding + tokens * (0.001 + 0.0005 * depth / 1000)


def run(cost: StepCost, steps: int, noise: float, decoding: int = 8, stretch: float = 2.5) -> list[float]:
    """Stretches of the steps of a 4000-token prompt beside decoding, after some steps that only decode."""
    rng, depth, found = random.Random(1), 0, []

    def noisy(value: float) -> float:
        return value * (1 + noise * rng.random())

    for _ in range(10):
        cost.observe(decoding, 0, 0, noisy(seconds(decoding, 0, 0)))
    for _ in range(steps):
        tokens = cost.tokens_beside(decoding, depth, stretch)
        took = seconds(decoding, tokens, depth)
        cost.observe(decoding, tokens, depth, noisy(took))
        found.append(took / seconds(decoding, 0, 0))
        depth = (depth + tokens) % 4000
    return found


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_steps_are_stretched_as_far_as_they_may_be(noise):
    found = sorted(run(StepCost(), 300, noise)[20:])
    assert 2.0 < found[len(found) // 2] < 2.7
    assert found[-1] < 3.2


def test_many_slow_steps_do_not_make_pieces_small_for_ever():
    cost = StepCost()
    run(cost, 50, 0.0)
    for _ in range(20):  # something else took the machine
        cost.observe(8, 8, 0, 0.5)
    assert cost.tokens_beside(8, 0, 2.5) == 8
    assert sorted(run(cost, 300, 0.1)[-100:])[50] > 2.0


def test_before_anything_is_known_pieces_are_short():
    cost = StepCost()
    assert cost.tokens_beside(4, 0, 2.5) == 32
    cost.observe(4, 32, 0, 0.1)
    assert cost.tokens_beside(4, 0, 2.5) == 32, "what decoding alone takes is not known yet"
    cost.observe(0, 100, 0, 0.1)
    cost.observe(4, 0, 0, 0.02)
    assert cost.tokens_beside(4, 0, 2.5) == 30


def test_steps_that_cost_nothing_do_not_divide_by_zero():
    cost = StepCost()
    cost.observe(4, 0, 0, 0.0)
    cost.observe(4, 10, 0, 0.0)
    assert cost.tokens_beside(4, 0, 2.5) >= 8
