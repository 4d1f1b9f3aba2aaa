"""pass@k, majority@k and intervals, against enumeration and textbook values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.controller.evaluation import _sampled, pass_at_k, wilson


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets(correct, k):
    samples = [i < correct for i in range(5)]
    subsets = [any(chosen) for chosen in itertools.combinations(samples, k)]
    assert pass_at_k(5, correct, k) == pytest.approx(np.mean(subsets))


def test_intervals():
    """Newcombe (1998), table 1: 81 of 263, and 0 of 20."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_majority_is_that_of_the_first_k():
    texts, correct = ["7", "8", "8 ", "7", "7"], np.array([1, 0, 0, 1, 1], bool)
    group = SimpleNamespace(group=SimpleNamespace(
        completions=[SimpleNamespace(text=text) for text in texts]))
    found = _sampled(group, correct)
    assert found["majority_at_1"] == 1 and found["majority_at_4"] == 1
    assert found["majority_at_5"] == 1 and found["pass_at_5"] == 1
    assert found["pass_at_1"] == pytest.approx(0.6)
    assert _sampled(group, correct[[1, 0, 0, 1, 1]])["majority_at_2"] == 0
