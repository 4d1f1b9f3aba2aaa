"""Splits of rows over context-parallel ranks: every token once, equally many, even work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import RowSplit, split_row


@st.composite
def trees(draw, longest: int = 60):
    """Any tree of segments, in the order in which rows have it."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=9))
    parents = [-1]
    path = [0]
    for segment in range(1, len(lengths)):
        depth = draw(st.integers(0, len(path)))
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], segment]
    return tree_of(lengths, parents)


def tree_of(lengths: list[int], parents: list[int]) -> RowTree:
    return RowTree(np.array(lengths, np.int64), np.array(parents, np.int64), ())


def test_the_example_of_the_module():
    split = split_row(tree_of([4, 5, 3], [-1, 0, 0]), 2, 7)
    assert split.owners.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    assert split.tree.lengths.tolist() == [4, 5, 3, 2]
    assert split.own(0).tolist() == [0, 3, 4, 5, 8, 9, 12]
    spans = [(span.above.tolist(), span.own.tolist()) for span in split.spans(1)]
    assert spans == [
        ([0], [1, 2]),
        ([0, 1, 2, 3, 4, 5], [6, 7]),
        ([0, 1, 2, 3, 9], [10, 11]),
        ([12], [13]),
    ]


def test_a_rank_that_gets_two_more_tokens_has_one_in_each_of_its_chunks():
    split = split_row(tree_of([7], [-1]), 2, 1)
    assert split.owners.tolist() == [0, 0, 1, 1, 1, 0, 0, 1]


def test_one_rank_has_the_whole_row():
    """As rows are without context parallelism."""
    split = split_row(tree_of([3, 4], [-1, -1]), 1, 4)
    assert split.is_whole
    assert split.tree.lengths.tolist() == [3, 4, 1]
    assert split.own(0).tolist() == split.gathered_places.tolist() == list(range(8))
    spans = [(span.above.tolist(), span.own.tolist()) for span in split.spans(0)]
    assert spans == [([], [0, 1, 2]), ([], [3, 4, 5, 6]), ([], [7])]


def test_a_row_without_tokens_is_padding():
    split = split_row(tree_of([], []), 2, 3)
    assert (split.num_own, split.owners.tolist()) == (3, [0, 0, 0, 1, 1, 1])


@given(tree=trees(), num_ranks=st.integers(1, 5), multiple_of=st.sampled_from([1, 2, 3, 16]))
@example(tree=tree_of([1], [-1]), num_ranks=4, multiple_of=1)
def test_every_token_is_computed_once_by_ranks_with_equally_many(tree, num_ranks, multiple_of):
    split = split_row(tree, num_ranks, multiple_of)
    everything = np.concatenate([split.own(rank) for rank in range(num_ranks)])
    assert sorted(everything.tolist()) == list(range(split.tree.num_tokens))
    assert split.num_own % multiple_of == 0
    assert all(len(split.own(rank)) == split.num_own for rank in range(num_ranks))
    least = -(-tree.num_tokens // (num_ranks * multiple_of)) * num_ranks * multiple_of
    assert split.tree.num_tokens == least
    np.testing.assert_array_equal(everything[split.gathered_places], np.arange(least))
    np.testing.assert_array_equal(split.tree.lengths[: len(tree.lengths)], tree.lengths)


@given(tree=trees(), num_ranks=st.integers(1, 5))
def test_spans_are_what_a_rank_has_and_all_that_is_before_it(tree, num_ranks):
    split = split_row(tree, num_ranks, 2)
    paths = _paths(split)
    for rank in range(num_ranks):
        spans = list(split.spans(rank))
        own = np.concatenate([span.own for span in spans])
        np.testing.assert_array_equal(own, split.own(rank))
        for span in spans:
            assert span.own.tolist() == list(range(span.own[0], span.own[-1] + 1))
            assert span.above.tolist() == paths[span.own[0]]


def _paths(split: RowSplit) -> list[list[int]]:
    """For each token the ones before it in its samples, by the tree alone."""
    paths = []
    for segment in range(len(split.tree.lengths)):
        path = split.tree.prefix(segment).tolist()
        for row in split.tree.own(segment).tolist():
            paths.append(list(path))
            path.append(row)
    return paths


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "tree",
    [
        tree_of([8192], [-1]),
        tree_of([5000, 3001, 191], [-1, -1, -1]),
        tree_of([1024, *[777] * 9], [-1, *[0] * 9]),
        tree_of([300, 2000, 1500, 1500, 999], [-1, 0, 1, 1, 0]),
    ],
    ids=["one sequence", "three sequences", "branches", "branches of branches"],
)
def test_work_of_attention_is_even(tree, num_ranks):
    split = split_row(tree, num_ranks, 1)
    work = [split.work(rank) for rank in range(num_ranks)]
    assert max(work) <= 1.005 * np.mean(work)


@given(tree=trees(longest=4000), num_ranks=st.integers(2, 4))
def test_work_is_as_even_as_whole_tokens_allow(tree, num_ranks):
    """A rank may have two tokens more of a segment than another has, and none behind these is
    longer than the longest path."""
    split = split_row(tree, num_ranks, 1)
    work = [split.work(rank) for rank in range(num_ranks)]
    slack = 2 * split.tree.longest_path * len(split.tree.lengths)
    assert max(work) - min(work) <= slack
