"""Which replica a prompt goes to: known prefixes, bounded load, even caches, and routers that agree. No Ray."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.runtime.prefix_cache import names_of_prompt
from pipeline.deploy.prefixes import Member, PrefixMap, RoutingConfig
from plugins.errors import KilnError

names = st.lists(st.integers(0, 30).map(lambda n: n.to_bytes(16, "little")), max_size=12, unique=True)
members = st.dictionaries(
    st.sampled_from("abcdef"), st.builds(Member, st.integers(0, 40), st.integers(1, 16), st.integers(0, 64)), min_size=1
)


def idle(*replicas: str, blocks: int = 1000) -> dict[str, Member]:
    return {name: Member(0, 4, blocks) for name in replicas}


def chain(seed: int, blocks: int = 8) -> list[bytes]:
    """Names of the blocks of a prompt of its own."""
    return names_of_prompt(random.Random(seed).choices(range(1000), k=blocks * 16 + 1), 16, "")


@given(st.lists(st.tuples(names, st.sampled_from("abcdef"))), names, members)
def test_every_replica_is_ranked_once_and_the_first_is_known_best_or_least_loaded(history, prompt, group):
    router: PrefixMap[str] = PrefixMap()
    for sent, replica in history:
        if replica in group:
            router.note(replica, sent, 0, group[replica].blocks)
    order = router.ranked(prompt, group)
    assert sorted(order) == sorted(group)
    known = {name: router.known(name, prompt) for name in group}
    least = min(member.load for member in group.values())
    first = order[0]
    if known[first] < max(known.values()):  # who knows more is overloaded, or knows too little to matter
        better = [name for name in group if known[name] > known[first]]
        for name in better:
            full = group[name].load - least >= 1.5 * group[name].places
            assert full or known[name] < 0.25 * len(prompt)
    else:
        assert known[first] > 0 or group[first].load == least


@given(st.lists(names), st.integers(0, 20))
def test_what_is_remembered_is_no_more_than_a_cache_holds_and_the_newest(prompts, blocks):
    router: PrefixMap[str] = PrefixMap()
    expected: OrderedDict[bytes, None] = OrderedDict()
    for prompt in prompts:
        router.note("a", prompt, 0, blocks)
        for name in reversed(prompt):
            expected.pop(name, None)
            expected[name] = None
        while len(expected) > blocks:
            expected.popitem(last=False)
    for number in range(31):
        name = number.to_bytes(16, "little")
        assert router.known("a", [name]) == (name in expected)


def test_a_prompt_goes_where_its_beginning_was_computed():
    router: PrefixMap[str] = PrefixMap()
    long, short = chain(1, 8), chain(1, 8)[:4]
    router.note("b", short, 0, 1000)
    router.note("c", long, 0, 1000)
    assert router.ranked(long, idle("a", "b", "c"))[:2] == ["c", "b"]


def test_a_replica_with_a_batch_and_a_half_more_to_do_is_passed_over():
    router: PrefixMap[str] = PrefixMap()
    prompt = chain(1)
    router.note("a", prompt, 0, 1000)
    busy = {"a": Member(5, 4, 1000), "b": Member(0, 4, 1000)}
    assert router.ranked(prompt, busy)[0] == "a"
    busy["a"] = Member(6, 4, 1000)
    assert router.ranked(prompt, busy)[0] == "b"
    assert router.ranked(prompt, {"a": Member(9, 4, 1000), "b": Member(9, 4, 1000)})[0] == "a", "all are as busy"


def test_a_short_common_beginning_does_not_send_everything_to_one_replica():
    router: PrefixMap[str] = PrefixMap()
    system = chain(0, 2)
    router.note("a", system, 0, 1000)
    question = system + chain(5, 20)
    assert router.ranked(question, {"a": Member(1, 4, 1000), "b": Member(0, 4, 1000)})[0] == "b"


def test_routers_that_know_nothing_of_each_other_choose_alike_and_spread_evenly():
    first, second = PrefixMap[str](), PrefixMap[str]()
    group = idle("a", "b", "c", blocks=10_000)
    counts = dict.fromkeys(group, 0)
    agreed = 0
    for seed in range(120):
        prompt = chain(seed)
        choice, other = (router.ranked(prompt, group)[0] for router in (first, second))
        first.note(choice, prompt, 0, 10_000)
        second.note(other, prompt, 0, 10_000)
        counts[choice] += 1
        agreed += choice == other
    assert agreed == 120
    assert max(counts.values()) <= 1.25 * 40


def test_in_turn_everybody_has_the_next_request():
    router: PrefixMap[str] = PrefixMap(RoutingConfig("round-robin"))
    assert [router.ranked(chain(1), idle("b", "a"))[0] for _ in range(4)] == ["a", "b", "a", "b"]


def test_by_load_what_replicas_know_does_not_count():
    router: PrefixMap[str] = PrefixMap(RoutingConfig("least-loaded"))
    prompt = chain(1)
    router.note("a", prompt, 0, 1000)
    assert router.ranked(prompt, {"a": Member(1, 4, 1000), "b": Member(0, 4, 1000)})[0] == "b"


def test_a_replica_that_is_gone_is_forgotten():
    router: PrefixMap[str] = PrefixMap()
    router.note("a", chain(1), 0, 1000)
    router.keep(["b"])
    assert router.known("a", chain(1)) == 0


def test_tenants_share_no_names():
    tokens = list(range(33))
    assert names_of_prompt(tokens, 16, "x") != names_of_prompt(tokens, 16, "")
    assert len(names_of_prompt(tokens[:32], 16, "")) == 1, "one token is always left to compute"


@pytest.mark.parametrize(
    "options", [{"policy": "random"}, {"worth": 0}, {"worth": 1.1}, {"slack": 0.0}, {"slack_blocks": 0.5}]
)
def test_routing_options_out_of_range(options):
    with pytest.raises(KilnError, match="expected"):
        RoutingConfig(**options)
