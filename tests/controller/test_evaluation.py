"""pass@k, majority@k and intervals, against enumeration and textbook values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.gates import result_names
from grpo_megatron.controller.evaluation import _sampled, over_domains, pass_at_k, wilson
from grpo_megatron.controller.group_filter import GroupFilter
from tests.controller.scored_groups import REWARD, group, recipe


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


def answered(texts, right, **domain) -> dict[str, float]:
    scored = group(right)
    completions = tuple(
        replace(c, text=text) for c, text in zip(scored.group.completions, texts, strict=True)
    )
    scored = replace(scored, group=replace(scored.group, completions=completions))
    return _sampled(scored, GroupFilter(recipe(d=domain)))


@pytest.mark.parametrize("num_samples", [0, 1, 5, 8])
def test_gates_may_ask_for_what_is_measured(num_samples):
    measured = {"d": {"prompts": 1.0, **_with_bounds({"accuracy": 1.0})}}
    if num_samples:
        right = [1] * num_samples
        measured["d"] |= _with_bounds(answered(["7"] * num_samples, right))
    measured["all"] = over_domains(measured, 1)
    found = {f"eval.{name}.{metric}" for name, values in measured.items() for metric in values}
    config = recipe(evaluation={"num_samples": num_samples})
    assert set(result_names(config)) == found | {"seconds", "steps", "accelerator_hours"}


def _with_bounds(values: dict[str, float]) -> dict[str, float]:
    bounds = {f"{name}_{side}": 0.5 for name in values for side in ("low", "high")}
    return values | bounds


def test_majority_is_that_of_the_first_k():
    found = answered(["7", "8", "8 ", "7", "7"], [1, 0, 0, 1, 1])
    assert found["majority_at_1"] == 1 and found["majority_at_4"] == 1
    assert found["majority_at_5"] == 1 and found["pass_at_5"] == 1
    assert found["pass_at_1"] == pytest.approx(0.6)
    assert answered(["8", "7", "7", "8", "8"], [0, 1, 1, 0, 0])["majority_at_2"] == 0


def test_the_majority_is_one_of_answers_not_of_thoughts():
    thoughts = ["so <answer>8</answer>", "thus <answer>7</answer>", "hence <answer> 7</answer>"]
    reward = {"function": REWARD, "name": "right", "arguments": {"answer_tag": "answer"}}
    assert answered(thoughts, [0, 1, 1], rewards=[reward])["majority_at_3"] == 1
    boxed = [r"a \boxed{8}", r"b \boxed{7}", r"\boxed{8}, no, \boxed{7} {sic}"]
    assert answered(boxed, [0, 1, 1])["majority_at_3"] == 1
    nested = r"\boxed{\frac{\sqrt{3}}{2}}"
    assert answered([r"\boxed{2}", f"a {nested}", f"b {nested}"], [0, 1, 1])["majority_at_3"] == 1
