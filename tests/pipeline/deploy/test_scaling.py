"""How many replicas there should be, and what each takes of its node. No Ray."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.deploy.placement import place
from pipeline.deploy.scaling import (
    BLOCK_USE,
    PLACES,
    WANTED,
    Load,
    LoadPolicy,
    ScalingTargets,
    block_use,
    wanted_replicas,
)
from pipeline.ray_cluster import Node
from plugins.errors import KilnError

loads = st.builds(Load, st.integers(1, 20), st.floats(0, 500), st.floats(1, 64), st.floats(0, 1))


@given(loads)
def test_the_number_brings_both_uses_to_their_targets_and_one_less_would_not(load):
    targets = ScalingTargets(places=0.8, blocks=0.8)
    wanted = wanted_replicas(load, targets)

    def enough(replicas: int) -> bool:
        queue = load.requests <= replicas * load.places * 0.8 * (1 + 1e-6)
        return queue and load.replicas * load.block_use <= replicas * 0.8 * (1 + 1e-6)

    assert wanted >= 1
    assert enough(wanted)
    assert wanted == 1 or not enough(wanted - 1) or wanted_replicas(load, ScalingTargets(1.0, 1.0)) <= wanted - 1


def test_requests_that_wait_for_blocks_count_as_those_that_hold_them():
    assert block_use(held=13, blocks=30, running=1, waiting=0) == pytest.approx(13 / 30)
    assert block_use(held=13, blocks=30, running=1, waiting=2) == pytest.approx(39 / 30)
    assert block_use(held=0, blocks=30, running=0, waiting=2) == 0  # nothing is known of any
    assert block_use(held=0, blocks=0, running=1, waiting=0) == 0  # a model without a cache


@given(loads, st.floats(0, 100))
def test_more_load_never_asks_for_fewer(load, more):
    heavier = Load(load.replicas, load.requests + more, load.places, min(1.0, load.block_use + more / 100))
    assert wanted_replicas(heavier, ScalingTargets()) >= wanted_replicas(load, ScalingTargets())


@dataclass(frozen=True)
class Point:
    value: float


@dataclass
class Context:
    """The part of Serve's AutoscalingContext that the policy reads."""

    current_num_replicas: int = 2
    target_num_replicas: int = 2
    total_num_requests: float = 0.0
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    raw_metrics: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


def reported(places: float, use: float) -> dict[str, dict[str, float]]:
    return {PLACES: {"a": places, "b": places}, BLOCK_USE: {"a": use, "b": use}}


def test_the_policy_follows_queue_and_blocks_within_the_least():
    policy = LoadPolicy(least=2, places=0.5, blocks=0.5)
    assert policy(Context(aggregated_metrics=reported(4, 0.0)))[0] == 2
    assert policy(Context(total_num_requests=12, aggregated_metrics=reported(4, 0.0)))[0] == 6
    assert policy(Context(aggregated_metrics=reported(4, 0.9)))[0] == 4


def test_what_a_rollout_says_overrules_the_load_and_an_old_word_does_not_count():
    policy = LoadPolicy(least=3)
    context = Context(total_num_requests=99, aggregated_metrics=reported(4, 1.0))
    context.raw_metrics = {WANTED: {"a": [Point(4.0), Point(1.0)], "b": []}}
    assert policy(context)[0] == 1


def test_nothing_reported_changes_nothing():
    assert LoadPolicy(least=1)(Context(target_num_replicas=5))[0] == 5


@pytest.mark.parametrize("targets", [{"places": 0.0}, {"blocks": 1.5}])
def test_targets_out_of_range(targets):
    with pytest.raises(KilnError, match="expected a share"):
        ScalingTargets(**targets)


# Placement

CPU = Node("1", "10.0.0.1", {"CPU": 8.0, "sku:cpu-avx2": 1.0})
GPUS = Node("2", "10.0.0.2", {"CPU": 32.0, "GPU": 4.0, "sku:h200": 1.0})


def test_one_replica_for_each_gpu_of_nodes_with_the_label():
    placed = place("h200", True, [CPU, GPUS])
    assert (placed.fitting, placed.gpus, placed.cpus) == (4, 1.0, 1.0)
    assert placed.options["resources"] == {"sku:h200": 0.001}


def test_cpu_nodes_are_shared_out_evenly():
    assert place("cpu-avx2", False, [CPU, GPUS]).threads == 8
    four = place("cpu-avx2", False, [CPU, CPU], per_node=4)
    assert (four.fitting, four.cpus, four.threads) == (8, 2.0, 2)
    assert place("cpu-avx2", False, [Node("1", "", {"CPU": 2.0})], per_node=4).cpus == 0.5


def test_a_cluster_without_labels_is_used_as_it_is():
    placed = place("cpu-avx2", False, [Node("1", "a", {"CPU": 4.0})])
    assert placed.options == {"num_cpus": 4.0, "num_gpus": 0.0}


@pytest.mark.parametrize(
    ("sku", "gpu", "options", "problem"),
    [
        ("a10", True, {}, "no node of the Ray cluster has the resource sku:a10.*sku:cpu-avx2, sku:h200"),
        ("cpu-avx2", True, {}, "needs a GPU"),
        ("cpu-avx2", False, {"cpus": 16.0}, "needs 16 CPUs; 10.0.0.1 has 8 CPUs"),
        ("cpu-avx2", False, {"per_node": 0}, "expected at least 1"),
    ],
)
def test_what_fits_nowhere_says_what_there_is(sku, gpu, options, problem):
    with pytest.raises(KilnError, match=problem):
        place(sku, gpu, [CPU, GPUS], **options)
