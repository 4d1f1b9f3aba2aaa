"""Properties of exchanging samples between micro-batches for even experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.expert_balance import ExpertLoads, imbalance, level_experts
from grpo_megatron.batching.packing import plan_microbatches
from tests.batching.test_shared_packing import duration_of, paths_of

CAPACITY = 64


@st.composite
def plans(draw):
    """Units in micro-batches, one to a few each, and what they need."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_places = draw(st.integers(1, 4))
    sizes, numbers = [], []
    for _ in range(num_ranks):
        of_rank = []
        for _ in range(num_places):
            units = draw(st.lists(st.integers(1, 16), max_size=4))
            of_rank.append(list(range(len(sizes), len(sizes) + len(units))))
            sizes += units
        numbers.append(of_rank)
    num_layers = draw(st.integers(1, 3))
    num_owners = draw(st.integers(2, 4))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    loads = random.integers(0, 20, (len(sizes), num_layers, num_owners)).astype(float)
    group = draw(st.sampled_from([size for size in (1, 2, 4) if num_ranks % size == 0]))
    return numbers, np.array(sizes, np.int64), loads, group


def step_time(numbers, costs, loads, group):
    """The most expensive rank of every micro-batch, and half of all as even experts would take."""
    cost = np.zeros((len(numbers), len(numbers[0])))
    num_groups = len(numbers) // group
    crowded = np.zeros((num_groups, len(numbers[0]), *loads.shape[1:]))
    for rank, of_rank in enumerate(numbers):
        for place, units in enumerate(of_rank):
            for unit in units:
                cost[rank, place] += costs[unit]
                crowded[rank // group, place] += loads[unit]
    waits = 0.0
    if crowded.sum():
        of_choice = 0.5 * cost.sum() / len(numbers) / crowded.mean(-1).sum()
        waits = of_choice * crowded.max(-1).sum()
    return cost.max(0).sum() + waits


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_unit_once_within_capacity_and_never_slower(plan):
    numbers, sizes, loads, group = plan
    costs = sizes.astype(float)
    found = level_experts(numbers, sizes, costs, loads, max_tokens=CAPACITY, ranks_per_group=group)
    assert [len(of_rank) for of_rank in found] == [len(of_rank) for of_rank in numbers]
    units = sorted(unit for of_rank in found for units in of_rank for unit in units)
    assert units == list(range(len(sizes)))
    for of_rank in found:
        for units in of_rank:
            assert sizes[units].sum() <= CAPACITY
    before = step_time(numbers, costs, loads, group)
    assert step_time(found, costs, loads, group) <= before * (1 + 1e-6)


def test_worked_example():
    """Two micro-batches of one rank, each for one of two owners of experts: one of both is even."""
    loads = np.array([[[8.0, 0.0]], [[8.0, 0.0]], [[0.0, 8.0]], [[0.0, 8.0]]])
    numbers = [[[0, 1], [2, 3]]]
    ones = np.ones(4, np.int64)
    assert imbalance(numbers, loads, 1) == 2.0
    found = level_experts(numbers, ones, ones.astype(float), loads, max_tokens=2, ranks_per_group=1)
    assert imbalance(found, loads, 1) == 1.0


def test_what_ranks_of_a_group_compute_at_once_is_one_load():
    loads = np.array([[[8.0, 0.0]], [[0.0, 8.0]]])
    numbers = [[[0]], [[1]]]
    assert imbalance(numbers, loads, 2) == 1.0
    assert imbalance(numbers, loads, 1) == 2.0
    assert imbalance(numbers, 0 * loads, 1) == 1.0


def skewed_step(num_groups: int, num_samples: int):
    """Groups of domains with experts of their own, prompts of 100 to 200 tokens, completions of 64
    to 256, two of whose tokens' eight choices in five are even."""
    random = np.random.default_rng(0)
    prompts = random.integers(100, 200, num_groups).tolist()
    completions = [random.integers(64, 256, num_samples).tolist() for _ in range(num_groups)]
    paths = paths_of(prompts, completions)
    of_domain = random.dirichlet(np.full(4, 0.3), (4, 6)) * 0.6 + 0.1
    share = np.repeat(of_domain[np.arange(num_groups) % 4], num_samples, 0)
    loads = ExpertLoads(
        share * 8 * paths.lengths[:, 0, None, None],
        share * 8 * paths.lengths[:, 1, None, None],
        ranks_per_group=2,
    )
    return paths, loads


@pytest.mark.parametrize(("num_groups", "num_samples"), [(64, 8), (128, 4)])
def test_the_imbalance_of_a_skewed_step_is_halved(num_groups, num_samples):
    """Beyond what no assignment can change: the imbalance of all samples together."""
    paths, experts = skewed_step(num_groups, num_samples)
    layout = {"num_ranks": 4, "max_tokens": 4096}
    plan = plan_microbatches(paths, **layout, experts=experts)
    everything = experts.prompts[::num_samples].sum(0) + experts.completions.sum(0)
    least = everything.max(-1).sum() / everything.mean(-1).sum()
    assert plan.experts.before > 1.05 * least
    assert plan.experts.after - least <= (plan.experts.before - least) / 2
    apart = plan_microbatches(paths, **layout)
    assert duration_of(plan.paths, plan.samples) <= 1.1 * duration_of(apart.paths, apart.samples)


def test_every_rank_finds_the_same():
    paths, experts = skewed_step(32, 4)
    found = [
        plan_microbatches(paths, num_ranks=4, max_tokens=4096, experts=experts) for _ in range(2)
    ]
    for one, other in zip(found[0].samples, found[1].samples, strict=True):
        for rows, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(rows, same)
