"""Properties of the plan that every rank computes for itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.packing import plan_microbatches, sample_costs
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.errors import DataError

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)
RANKS = st.integers(1, 5)
MULTIPLES = st.integers(1, 4)


def plan_of(lengths, num_ranks, multiple_of=1, max_tokens=CAPACITY):
    plan = plan_microbatches(
        SamplePaths.without_sharing(np.array(lengths, np.int64)),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        multiple_of=multiple_of,
    )
    return plan.samples


@settings(max_examples=200, deadline=None)
@given(LENGTHS, RANKS, MULTIPLES)
def test_every_sample_once_within_capacity_and_equal_counts(lengths, num_ranks, multiple_of):
    plan = plan_of(lengths, num_ranks, multiple_of)
    assert len(plan) == num_ranks
    bins = [rows for rank in plan for rows in rank]
    assert sorted(row for rows in bins for row in rows.tolist()) == list(range(len(lengths)))
    assert all(np.array(lengths)[rows].sum() <= CAPACITY for rows in bins if len(rows))
    assert {len(rank) for rank in plan} == {len(plan[0])}
    assert len(plan[0]) % multiple_of == 0
    assert len(plan[0]) >= 1


@settings(max_examples=100, deadline=None)
@given(LENGTHS, RANKS, MULTIPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(lengths, num_ranks, multiple_of, random):
    def composition(order):
        plan = plan_of(order, num_ranks, multiple_of)
        return Counter(tuple(sorted(order[row] for row in rows)) for rank in plan for rows in rank)

    shuffled = random.sample(lengths, len(lengths))
    assert composition(lengths) == composition(shuffled)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, RANKS)
def test_no_more_microbatches_than_needed(lengths, num_ranks):
    """First-fit decreasing uses at most 11/9 of the optimum plus one; levelling may add a step."""
    plan = plan_of(lengths, num_ranks, 1)
    lower_bound = -(-sum(lengths) // CAPACITY)
    bins = len(plan[0]) * num_ranks
    first_fit = 2 * lower_bound + 1  # any first-fit packing is at least half full
    assert bins <= -(-first_fit // num_ranks) * num_ranks + num_ranks


def test_costs_are_balanced_not_counts():
    """One long sample weighs as much as several short ones."""
    lengths = np.array([4096] + [512] * 15)
    plan = plan_of(lengths, 2, max_tokens=8192)
    loads = [sum(sample_costs(lengths[rows]).sum() for rows in rank) for rank in plan]
    assert max(loads) / min(loads) < 1.2


def rows_by_rank(lengths: list[int], num_ranks: int = 1, multiple_of: int = 1) -> list:
    plan = plan_of(lengths, num_ranks, multiple_of)
    return [[rows.tolist() for rows in of_rank] for of_rank in plan]


def test_a_cost_is_the_length_and_a_share_of_its_square():
    assert sample_costs(np.array([0, 1024, 4096])).tolist() == [0, 1024 + 256, 2 * 4096]
    assert sample_costs(np.array([3]), quadratic=2.0).tolist() == [21.0]
    assert sample_costs(np.array([1 << 20], np.int32)).tolist() == [(1 << 20) + (1 << 28)]


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "multiple_of", "expected"),
    [
        ([64, 64, 64], 1, 1, 3),
        ([32, 32, 32, 32], 1, 1, 2),
        ([33, 33, 33, 33], 1, 1, 4),
        ([33, 33, 33, 31], 1, 1, 3),
        ([40, 24, 1], 1, 1, 2),
        ([64, 64, 64], 2, 1, 2),
        ([64], 2, 3, 3),
        ([], 3, 2, 2),
    ],
)
def test_how_many_micro_batches_a_rank_has(lengths, num_ranks, multiple_of, expected):
    plan = plan_of(lengths, num_ranks, multiple_of)
    assert [len(of_rank) for of_rank in plan] == [expected] * num_ranks


def test_a_sample_goes_to_the_cheapest_micro_batch_with_room():
    assert rows_by_rank([40, 30, 20, 10]) == [[[0, 3], [1, 2]]]
    # the fourth fills the cheaper one exactly
    assert sorted(rows_by_rank([60, 50, 10, 4, 4])[0]) == [[0, 4], [1, 2, 3]]


def test_a_cheap_micro_batch_without_room_waits_for_a_shorter_sample():
    """Nine samples of 900 cost less than one of 4096 and two of 900, but the next does not fit."""
    lengths = np.array([4096] + [900] * 12 + [50])
    ((long, short),) = plan_of(lengths, 1, max_tokens=8192)
    assert lengths[long].tolist() == [4096, 900, 900, 900]
    assert lengths[short].tolist() == [900] * 9 + [50]


def test_the_most_expensive_micro_batch_goes_to_the_least_loaded_rank():
    assert rows_by_rank([60, 50, 40, 36], 2) == [[[0], [3]], [[1], [2]]]
    # the second rank stays the cheaper one, but has as many as it may have
    assert rows_by_rank([64, 33], 2, multiple_of=2) == [[[0], []], [[1], []]]


def test_a_sample_that_fits_nowhere_is_named():
    with pytest.raises(DataError, match="sample 2 has 65 tokens, a micro-batch holds 64"):
        plan_of([3, 4, 65, 5], 1, 1)
