"""Which samples of a graded group become a pair."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.data.preference_pairs import pair_of

NAN = np.nan


@pytest.mark.parametrize(
    ("rewards", "correct", "how", "pair"),
    [
        ([0.2, 1.0, 0.0, 1.0], [0, 1, 0, 1], "best_worst", (1, 2)),
        ([0.2, 1.0, 0.0, 1.0], [0, 1, 0, 1], "correct_incorrect", (1, 2)),
        # a long right answer has a lower reward than a short wrong one
        ([0.5, 0.1], [0, 1], "best_worst", (0, 1)),
        ([0.5, 0.1], [0, 1], "correct_incorrect", (1, 0)),
        ([1.0, 1.0], [1, 1], "best_worst", None),
        ([1.0, 0.0], [1, 1], "correct_incorrect", None),
        ([1.0, NAN, 0.5], [1, NAN, 1], "best_worst", (0, 2)),
        ([NAN, NAN], [NAN, NAN], "best_worst", None),
    ],
)
def test_pairs(rewards, correct, how, pair):
    found = pair_of(np.array(rewards), np.array(correct, float), [True] * len(rewards), how)
    assert (found and (found.chosen, found.rejected)) == pair


def test_samples_that_may_be_in_no_pair():
    rewards = np.array([1.0, 0.5, 0.0])
    correct = np.array([1.0, 1.0, 0.0])
    found = pair_of(rewards, correct, [False, True, True], "best_worst")
    assert found is not None and (found.chosen, found.rejected, found.margin) == (1, 2, 0.5)
    assert pair_of(rewards, correct, [True, False, False], "best_worst") is None
