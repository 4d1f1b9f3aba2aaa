"""Published times against what is predicted for them."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest

from grpo_megatron.plan.timing.constants import shipped_constants
from grpo_megatron.plan.timing.prediction import MEDIAN_ERROR, WORST_ERROR
from grpo_megatron.plan.timing.published import error_of, predict, published_times

ROWS = published_times().rows
REACHED = {"fitted": (0.06, 0.31), "judged": (MEDIAN_ERROR, WORST_ERROR)}
"""Median and worst error of each half. Wanted of the judged one: 0.15 and 0.40, which is not
reached; its DeepSeek-V3 rows with engines on the trainers' GPUs are predicted much too short."""


@pytest.mark.parametrize("half", REACHED)
def test_errors_are_what_is_claimed(half):
    found = []
    for row in ROWS:
        if row.half == half:
            predicted = predict(row, shipped_constants())
            found += [error_of(predicted[what], number) for what, number in row.seconds.items()]
    median, worst = REACHED[half]
    assert len(found) == {"fitted": 38, "judged": 35}[half]
    assert median - 0.01 < statistics.median(found) <= median
    assert worst - 0.01 < max(found) <= worst


def test_halves_follow_the_rule():
    """Configurations of a source in order of publication: fitted, judged, judged, fitted."""
    by_source: dict[str, dict[str, str]] = defaultdict(dict)
    for row in ROWS:
        source = row.configuration.split()[0]
        half = by_source[source].setdefault(row.configuration, row.half)
        assert half == row.half, row.name
    for halves in by_source.values():
        pattern = ("fitted", "judged", "judged", "fitted")
        expected = [pattern[number % 4] for number in range(len(halves))]
        assert list(halves.values()) == expected


def test_every_row_names_its_source():
    for row in ROWS:
        assert row.source and row.commit and row.date
    assert all(published_times().left_out.values())
