"""Rewards of a case are what training makes of the same components."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.rewards.pool import weighted_sum
from tests.algorithms.evaluation import evaluated

LOGPROBS = [[-1.0], [-1.0], [-1.0]]


def rewards(components: dict[str, list[float | None]], weights: dict[str, float]) -> list[float]:
    case = {"logprobs": LOGPROBS, "components": components, "component_weights": weights}
    return parse_case(case).batch.rewards.tolist()


def test_a_sample_without_any_component_is_as_one_without_a_reward():
    by_reward = evaluated("grpo", logprobs=LOGPROBS, rewards=[None, 1.0, 0.5])
    by_component = evaluated("grpo", logprobs=LOGPROBS, components={"a": [None, 1.0, 0.5]})
    assert by_component["advantages"] == by_reward["advantages"]
    assert by_component["advantages"][0] == 0
    assert by_component["advantages"][1] == pytest.approx(math.sqrt(0.5), rel=1e-4)


def test_a_component_that_is_null_is_left_out_of_the_sum():
    found = rewards({"a": [None, 1, None], "b": [0.5, 0.5, None]}, {"a": 2.0})
    np.testing.assert_equal(found, [0.5, 2.5, math.nan])


def test_what_weighs_nothing_scores_nothing():
    found = rewards({"a": [None, 1, 0], "logged": [1, None, 1]}, {"logged": 0.0})
    np.testing.assert_equal(found, [math.nan, 1, 0])
    alone = rewards({"logged": [None, 1, 0]}, {"logged": 0.0})
    np.testing.assert_equal(alone, [math.nan, 0, 0])


VALUES = st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=3, max_size=3)


@given(st.lists(st.tuples(VALUES, st.sampled_from([0.0, -1.0, 0.5, 2.0])), min_size=1, max_size=3))
def test_the_sum_is_that_of_training(given_components):
    components = {}
    weights = {}
    for number, (values, weight) in enumerate(given_components):
        components[str(number)] = values
        weights[str(number)] = weight
    table = np.array(list(components.values()), np.float64).T
    of_training = weighted_sum(table, np.array(list(weights.values())))
    np.testing.assert_allclose(rewards(components, weights), of_training)
