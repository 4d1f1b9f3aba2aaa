"""Length and repetition: golden numbers, and what must hold for every length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.rewards.functions import (
    cosine_length,
    length_penalty,
    repetition,
    soft_overlong,
)
from tests.algorithms.golden import GOLDEN

NUMBERS = GOLDEN["rewards"]
FUNCTIONS = "grpo_megatron.rewards.functions"
counts = st.integers(0, 10**6)


def cosine(n, *, right, **arguments):
    return cosine_length(
        "1" if right else "2",
        "1",
        prompt="",
        metadata={},
        num_tokens=n,
        **{"max_tokens": 100, **arguments},
    )


def test_soft_overlong_golden():
    case = NUMBERS["soft_overlong"]
    assert [
        soft_overlong("", "", num_tokens=n, max_tokens=case["max_tokens"], buffer=case["buffer"])
        for n in case["num_tokens"]
    ] == case["out"]


@pytest.mark.parametrize("which", ["correct", "wrong"])
def test_cosine_length_golden(which):
    case = NUMBERS["cosine_length"]
    assert [cosine(n, right=which == "correct") for n in case["num_tokens"]] == pytest.approx(
        case[which], abs=1e-15
    )


def test_repetition_golden():
    case = NUMBERS["repetition"]
    assert [
        repetition("", "", token_ids=tuple(ids), n=n)
        for ids, n in zip(case["token_ids"], case["n"], strict=True)
    ] == case["out"]


@given(counts, counts)
def test_longer_right_answers_score_less_and_longer_wrong_ones_more(n, more):
    assert 0.5 <= cosine(n + more, right=True) <= cosine(n, right=True) <= 1
    assert -1 <= cosine(n, right=False) <= cosine(n + more, right=False) <= -0.5


@given(counts, counts, st.integers(1, 10**5))
def test_soft_overlong_falls_from_zero_to_minus_one(n, more, buffer):
    arguments = {"max_tokens": 10**5, "buffer": buffer}
    short = soft_overlong("", "", num_tokens=n, **arguments)
    assert -1 <= soft_overlong("", "", num_tokens=n + more, **arguments) <= short <= 0


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_lies_between_the_penalty_and_zero(ids, n):
    value = repetition("", "", token_ids=tuple(ids), n=n, penalty=-2.0)
    assert -2 < value <= 0
    assert repetition("", "", token_ids=tuple(range(len(ids))), n=n) == 0


def test_accuracy_is_a_function_of_the_users():
    numeric = {"accuracy": f"{FUNCTIONS}:numeric_match", "accuracy_arguments": {"tolerance": 1.0}}
    assert cosine(100, right=False, **numeric) == 0.5
    gym = {"accuracy": f"{FUNCTIONS}:reasoning_gym_score"}
    value = cosine_length(
        "85",
        "85",
        prompt="",
        metadata={"source_dataset": "chain_sum"},
        num_tokens=0,
        max_tokens=9,
        **gym,
    )
    assert value == 1.0
    assert math.isnan(cosine_length("1", "", prompt="", metadata={}, num_tokens=1, max_tokens=9))


def test_length_penalty():
    assert [length_penalty("", "", num_tokens=n, max_tokens=100) for n in (0, 50, 100, 200)] == [
        0,
        -0.5,
        -1,
        -1,
    ]
    gated = {"correct": [0, -1], "wrong": [0, 0]}
    assert cosine(100, right=True, **gated) == -1 and cosine(100, right=False, **gated) == 0
