"""Packed attention equals one call a sequence, with branches a dense mask; gradients included."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    value_size=st.sampled_from([8, 4]),
)
@example(lengths=[1], heads=(4, 2), value_size=8)
@example(lengths=[1] * 20, heads=(4, 2), value_size=8)
@example(lengths=[40, 1, 40, 2, 39, 3], heads=(4, 2), value_size=8)
@example(lengths=list(range(1, 30)), heads=(4, 4), value_size=8)
def test_packed_is_one_sequence_at_a_time(world1, lengths, heads, value_size):
    errors = world1.run(
        "tests.trainer.numbers:attention",
        lengths=lengths,
        num_heads=heads[0],
        num_groups=heads[1],
        value_size=value_size,
    )
    assert sorted(errors) == ["key", "output", "query", "value"]
    assert max(errors.values()) < 2e-5, errors


@st.composite
def trees(draw):
    """Lengths and parents of segments: any tree, in the order in which rows have it."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=9))
    parents = [-1]
    path = [0]
    for segment in range(1, len(lengths)):
        depth = draw(st.integers(0, len(path)))
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], segment]
    return lengths, parents


PROMPT = [-1] + [0] * 7


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tree=trees(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    value_size=st.sampled_from([8, 4]),
)
@example(tree=([16, *[5] * 7], PROMPT), heads=(4, 2), value_size=8)
@example(tree=([16, *range(1, 8)], PROMPT), heads=(4, 2), value_size=8)
@example(tree=([3, 540, 2, 9, 530, 1, 1], [-1, 0, 0, -1, 3, 3, 5]), heads=(4, 2), value_size=8)
@example(
    tree=([9, 2, 2, 12, 3, 2, 30, 1, 1], [-1, 0, 0, -1, 3, 3, -1, 6, 6]), heads=(4, 4), value_size=4
)
@example(tree=([5, 4, 3, 2, 2, 6, 7], [-1, 0, 1, 2, 2, 1, 0]), heads=(4, 2), value_size=8)
def test_branches_see_what_is_above_them_and_their_own_past(world1, tree, heads, value_size):
    lengths, parents = tree
    errors = world1.run(
        "tests.trainer.numbers:tree_attention",
        lengths=lengths,
        parents=parents,
        num_heads=heads[0],
        num_groups=heads[1],
        value_size=value_size,
    )
    assert sorted(errors) == ["gathered", "key", "output", "query", "value"]
    assert max(errors.values()) < 2e-5, errors


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tree=trees(),
    num_ranks=st.sampled_from([2, 3, 4]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    value_size=st.sampled_from([8, 4]),
)
@example(tree=([16, *[5] * 7], PROMPT), num_ranks=2, heads=(4, 2), value_size=8)
@example(tree=([2100], [-1]), num_ranks=2, heads=(4, 2), value_size=8)
@example(tree=([1200, 1300, 3], [-1, 0, 0]), num_ranks=2, heads=(4, 4), value_size=4)
@example(tree=([1], [-1]), num_ranks=4, heads=(4, 2), value_size=8)
def test_ranks_that_share_a_row_compute_what_one_does(world1, tree, num_ranks, heads, value_size):
    """Rows long enough for several blocks of queries among them."""
    lengths, parents = tree
    errors = world1.run(
        "tests.trainer.numbers:tree_attention",
        lengths=lengths,
        parents=parents,
        num_heads=heads[0],
        num_groups=heads[1],
        value_size=value_size,
        num_context_ranks=num_ranks,
    )
    assert sorted(errors) == ["gathered", "key", "output", "query", "value"]
    assert max(errors.values()) < 2e-5, errors
