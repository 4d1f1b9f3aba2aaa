from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.stats import Stats

VALUES = st.lists(st.integers(-(1 << 20), 1 << 20).map(lambda n: n / 1024), max_size=5)


def stats_of(values: list[float]) -> Stats:
    tensor, stats = torch.tensor(values, dtype=torch.float32), Stats()
    stats.set_mean("mean", tensor.double().sum(), float(len(values)))
    stats.set_maximum("max", tensor)
    return stats


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=6))
def test_means_and_maxima_are_those_of_all_values(parts):
    """Also of negative values, and where a part is empty."""
    total = Stats()
    for part in parts:
        total.add(stats_of(part))
    values, found = [value for part in parts for value in part], total.result()
    if not values:
        assert found == {}  # nothing was counted
        return
    assert found["mean"] == float(sum(map(Fraction, values)) / len(values))
    assert found["max"] == max(values)


def test_gradients_are_not_kept():
    stats = Stats()
    stats.set_mean("mean", torch.ones(3, requires_grad=True).sum(), 3.0)
    stats.set_maximum("max", torch.ones(3, requires_grad=True))
    assert not stats.means["mean"].requires_grad and not stats.maxima["max"].requires_grad


def test_a_sum_does_not_change_what_was_added():
    first, second = stats_of([1.0]), stats_of([2.0])
    total = Stats()
    total.add(first)
    total.add(second)
    assert (first.result(), second.result()) == (
        {"mean": 1.0, "max": 1.0},
        {"mean": 2.0, "max": 2.0},
    )
