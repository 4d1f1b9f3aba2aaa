"""Packed attention equals one call a sequence, gradients included."""

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
