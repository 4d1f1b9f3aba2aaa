"""Rows as trees: every sample's tokens in order, each shared piece once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.prefix_rows import RowTree, SamplePaths, lay_out

EXAMPLE = SamplePaths.of_pieces(
    np.array([[0, 1], [0, 2], [3, 4]]), np.array([[3, 3], [3, 2], [2, 1]])
)
"""The one of the module's docstring."""


def test_the_example_of_the_docstring():
    tree = lay_out(EXAMPLE)
    assert tree.lengths.tolist() == [3, 3, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 0, -1]
    assert tree.first_positions.tolist() == [0, 3, 3, 0]
    assert tree.bounds == [0, 3, 6, 8, 11]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2]
    rows = [of_sample.tolist() for of_sample in tree.token_rows]
    assert rows == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7], [8, 9, 10]]
    assert tree.has_branches
    assert tree.longest_path == 6


def test_samples_that_share_nothing_lie_end_to_end():
    tree = lay_out(SamplePaths.without_sharing(np.array([4, 5])))
    assert tree.lengths.tolist() == [4, 5]
    assert not tree.has_branches
    assert [rows.tolist() for rows in tree.token_rows] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]


def test_apart_keeps_how_often_a_token_is_used():
    apart = EXAMPLE.apart()
    assert lay_out(apart).lengths.tolist() == [6, 5, 3]
    assert apart.uses.tolist() == EXAMPLE.uses.tolist() == [[2, 1], [2, 1], [1, 1]]


def test_a_fork_within_a_completion_sees_prompt_and_stem():
    """Prompt 0, stem 1 of two completions, a third without it."""
    paths = SamplePaths.of_pieces(
        np.array([[0, 1, 2], [0, 1, 3], [0, 4, 5]]), np.array([[2, 3, 1], [2, 3, 2], [2, 4, 0]])
    )
    tree = lay_out(paths)
    assert tree.lengths.tolist() == [2, 3, 1, 2, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0]
    assert tree.prefix(3).tolist() == [0, 1, 2, 3, 4]
    assert tree.first_positions.tolist() == [0, 2, 5, 5, 2]


def test_pieces_are_counted_once_with_what_is_before_them():
    """Prompt 0 of two samples, of which the second has no other piece."""
    paths = SamplePaths.of_pieces(
        np.array([[0, 1, 2], [0, 4, 4], [3, 1, 4]]), np.array([[2, 3, 1], [2, 0, 0], [5, 3, 0]])
    )
    lengths, before = paths.distinct_pieces(np.array([0, 1]))
    assert lengths.tolist() == [2, 3, 1]
    assert before.tolist() == [0, 2, 5]


def test_padding_is_a_segment_that_nobody_shares():
    tree = lay_out(EXAMPLE).padded(5)
    assert tree.num_tokens == 16
    assert tree.parents.tolist()[-1] == -1
    assert tree.positions[-5:].tolist() == [0, 1, 2, 3, 4]
    assert lay_out(EXAMPLE).padded(0).num_tokens == 11


def test_a_row_without_samples_is_empty():
    tree = lay_out(SamplePaths.without_sharing(np.empty(0, np.int64)))
    assert tree.num_tokens == 0
    assert tree.token_rows == ()


@st.composite
def token_tries(draw):
    """Samples of few different tokens, and their pieces: those of a trie with forks anywhere."""
    samples = draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)
    )
    depth = max(len(sample) for sample in samples)
    numbers: dict[tuple[int, ...], int] = {}
    pieces = np.full((len(samples), depth), -1)
    for row, sample in enumerate(samples):
        for end in range(1, len(sample) + 1):
            pieces[row, end - 1] = numbers.setdefault(tuple(sample[:end]), len(numbers))
    return samples, SamplePaths.of_pieces(pieces, (pieces >= 0).astype(np.int64))


@settings(max_examples=200, deadline=None)
@given(token_tries())
def test_every_token_sees_exactly_its_sample(case):
    samples, paths = case
    tree = lay_out(paths)
    assert tree.num_tokens == paths.count_tokens(np.arange(len(samples)))
    assert tree.num_tokens == len(
        {tuple(sample[:end]) for sample in samples for end in range(1, len(sample) + 1)}
    )
    assert tree.lengths.all()
    tokens = np.full(tree.num_tokens, -1)
    for sample, rows in zip(samples, tree.token_rows, strict=True):
        tokens[rows] = sample
        assert tree.positions[rows].tolist() == list(range(len(sample)))
    for sample, rows in zip(samples, tree.token_rows, strict=True):
        assert tokens[rows].tolist() == sample
        segment = int(np.searchsorted(tree.bounds, rows[-1], side="right")) - 1
        seen = [*tree.prefix(segment), *range(tree.bounds[segment], rows[-1] + 1)]
        assert seen == rows.tolist()
    _assert_that_segments_are_whole(tree, paths)


def _assert_that_segments_are_whole(tree: RowTree, paths: SamplePaths) -> None:
    """No segment has a single other one that continues it."""
    _, num_children = np.unique(tree.parents[tree.parents >= 0], return_counts=True)
    assert (num_children > 1).all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_tokens_of_a_row_are_counted(shared):
    paths = EXAMPLE if shared else EXAMPLE.apart()
    assert paths.count_tokens(np.array([0, 1])) == (8 if shared else 11)
    assert paths.count_tokens(np.array([1, 2])) == 8
    assert paths.of(np.array([1, 2])).uses.tolist() == [[2, 1], [1, 1]]
