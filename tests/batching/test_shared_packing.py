"""Properties of the plan for samples that share prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.packing import (
    KEY_SHARE,
    plan_microbatches,
)
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.errors import DataError

CAPACITY = 64


def paths_of(prompts: list[int], completions: list[list[int]]) -> SamplePaths:
    """Groups of a prompt of so many tokens and its completions."""
    pieces = []
    lengths = []
    for number, (prompt, of_group) in enumerate(zip(prompts, completions, strict=True)):
        for completion in of_group:
            pieces.append((number, len(prompts) + len(pieces)))
            lengths.append((prompt, completion))
    return SamplePaths.of_pieces(
        np.array(pieces, np.int64).reshape(-1, 2), np.array(lengths, np.int64).reshape(-1, 2)
    )


GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 24), min_size=1, max_size=8)),
    max_size=10,
)


def plan_of(groups, num_ranks=1, multiple_of=1, max_tokens=CAPACITY):
    paths = paths_of([prompt for prompt, _ in groups], [of_group for _, of_group in groups])
    plan = plan_microbatches(
        paths, num_ranks=num_ranks, max_tokens=max_tokens, multiple_of=multiple_of
    )
    return plan.paths, plan.samples


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(1, 5), st.integers(1, 4))
def test_every_sample_once_within_capacity_and_equal_counts(groups, num_ranks, multiple_of):
    paths, plan = plan_of(groups, num_ranks, multiple_of)
    assert len(plan) == num_ranks
    rows_of = [rows for of_rank in plan for rows in of_rank]
    assert sorted(row for rows in rows_of for row in rows.tolist()) == list(
        range(len(paths.totals))
    )
    for rows in rows_of:
        assert paths.count_tokens(rows) <= CAPACITY
        assert rows.tolist() == sorted(rows.tolist())
    assert {len(of_rank) for of_rank in plan} == {len(plan[0])}
    assert len(plan[0]) % multiple_of == 0
    assert len(plan[0]) >= 1


def plan_apart(paths, num_ranks):
    alone = SamplePaths.without_sharing(paths.totals)
    return plan_microbatches(alone, num_ranks=num_ranks, max_tokens=CAPACITY).samples


def duration_of(paths, plan):
    """What a step costs whose ranks wait for each other after every micro-batch."""
    duration = 0.0
    for of_ranks in zip(*plan, strict=True):
        duration += max(row_cost(paths, rows) for rows in of_ranks)
    return duration


def row_cost(paths, rows):
    """A first piece once, whole; every branch by its own queries or by all, whichever is less."""
    cost = 16.0
    of_first_piece = {}
    for row in rows.tolist():
        of_first_piece.setdefault(int(paths.pieces[row, 0]), []).append(row)
    for samples in of_first_piece.values():
        totals = [int(paths.totals[sample]) for sample in samples]
        if len(samples) == 1:
            cost += totals[0] + totals[0] ** 2 / 4096
            continue
        first = int(paths.lengths[samples[0], 0])
        cost += first + first**2 / 4096
        for total in totals:
            own = total - first
            cost += own + min(2 * own * total, total**2) / 4096
    return cost


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(1, 4))
@example([(3, [24]), (5, [4, 4, 24, 24]), (6, [2, 3, 3, 19, 19, 24, 24])], 1)
def test_never_more_tokens_nor_time_than_without_sharing(groups, num_ranks):
    paths, plan = plan_of(groups, num_ranks)
    apart = plan_apart(paths, num_ranks)
    shared_duration = duration_of(paths, plan)
    assert shared_duration <= duration_of(paths.apart(), apart) + 1e-6
    computed = sum(paths.count_tokens(rows) for of_rank in plan for rows in of_rank)
    assert computed <= paths.totals.sum()


def test_nothing_is_shared_where_samples_fill_fewer_micro_batches_by_themselves():
    """Two groups of 40 tokens need two micro-batches; four of 20 samples fill one and a half."""
    groups = [(1, [19, 19]), (1, [19, 19]), (1, [19, 19])]
    paths, plan = plan_of(groups)
    apart = plan_apart(paths, 1)
    assert [rows.tolist() for rows in plan[0]] == [rows.tolist() for rows in apart[0]]
    assert len(plan[0]) == 2
    assert sum(paths.count_tokens(rows) for rows in plan[0]) == paths.totals.sum()


def test_where_nothing_is_shared_rows_repeat_what_their_samples_have_in_common():
    """By themselves the samples fill three micro-batches, in two of which they begin alike."""
    paths, plan = plan_of([(1, [21, 10, 20, 16]), (7, [20, 23, 18, 9])])
    assert [rows.tolist() for rows in plan[0]] == [[0, 6, 7], [1, 3, 5], [2, 4]]
    totals = [22 + 25 + 16, 11 + 17 + 30, 21 + 27]
    assert [paths.count_tokens(rows) for rows in plan[0]] == totals


def test_long_completions_share_a_short_prompt():
    """A branch attends causally to all where that is less: it costs no more than the sample."""
    paths, plan = plan_of([(1, [1000] * 4)], max_tokens=8192)
    assert [paths.count_tokens(rows) for rows in plan[0]] == [1 + 4 * 1000]


def test_a_group_stays_together():
    _, plan = plan_of([(10, [5] * 8), (10, [5] * 8)], max_tokens=75)
    assert [rows.tolist() for rows in plan[0]] == [list(range(8)), list(range(8, 16))]


def test_a_group_that_no_micro_batch_holds_repeats_its_prompt():
    paths, plan = plan_of([(20, [15] * 4)])
    assert [len(rows) for rows in plan[0]] == [2, 2]
    assert [paths.count_tokens(rows) for rows in plan[0]] == [50, 50]


def test_one_group_is_split_over_ranks_that_would_wait():
    paths, plan = plan_of([(512, [128] * 16)], num_ranks=4, max_tokens=4096)
    rows_of = [rows for of_rank in plan for rows in of_rank]
    assert [len(rows) for rows in rows_of] == [4] * 4
    assert [paths.count_tokens(rows) for rows in rows_of] == [512 + 4 * 128] * 4


def test_on_one_rank_levelling_repeats_no_prompt():
    groups = [(30, [4, 4, 4]), (5, [3, 2]), (20, [10, 20]), (8, [1])]
    paths, plan = plan_of(groups, max_tokens=70)
    computed = sum(paths.count_tokens(rows) for rows in plan[0])
    assert computed == paths.count_tokens(np.arange(len(paths.totals)))


def test_real_work_is_levelled_not_the_samples():
    """Eight groups of a long prompt weigh as much as one of completions as long together."""
    groups = [(1000, [10] * 8)] * 8 + [(10, [1000] * 8)] * 1
    paths, plan = plan_of(groups, num_ranks=2, max_tokens=20_000)
    loads = [sum(paths.count_tokens(rows) for rows in of_rank) for of_rank in plan]
    assert max(loads) / min(loads) < 1.15


def test_keys_that_branches_gather_are_bounded():
    """A long prompt with many short completions would gather its keys for each of them."""
    paths, plan = plan_of([(1000, [8] * 64)], max_tokens=2048)
    assert len(plan[0]) > 1
    for rows in plan[0]:
        size = paths.count_tokens(rows) + KEY_SHARE * paths.totals[rows].sum()
        assert size <= 2048


def test_a_sample_that_fits_nowhere_is_named():
    with pytest.raises(DataError, match="sample 1 has 65 tokens, a micro-batch holds 64"):
        plan_of([(40, [3, 25])])
