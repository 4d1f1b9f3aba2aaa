from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages import group_advantages
from tests.algorithms.golden import GOLDEN

NAN = float("nan")


def advantages(groups: list[list[float]], std: str) -> list[list[float]]:
    sizes = [len(group) for group in groups]
    ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    found = group_advantages(rewards, ids, std=std)
    return [part.tolist() for part in found.split(sizes)]


def assert_close(found: list[list[float]], expected: list[list[float]], tolerance=1e-9) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=tolerance)


@pytest.mark.parametrize("std", ["none", "group"])
def test_golden(std):
    case = GOLDEN["advantages"]
    assert_close(advantages(case["rewards"], std), case["std"][std])


def test_golden_pair():
    case = GOLDEN["two_grpo"]
    assert_close(advantages(case["rewards"], "none"), case["std"]["none"])
    # the number has no epsilon; ours moves it by eps / std
    assert_close(advantages(case["rewards"], "group"), case["std"]["group_eps0"], 2e-6)


@pytest.mark.parametrize("std", ["none", "group"])
def test_a_group_of_one_gets_nothing(std):
    case = GOLDEN["advantages_edge_G1"]
    assert advantages(case["rewards"], std) == case["out"]


@pytest.mark.parametrize("std", ["none", "group"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1e6 + 1e-9] * 3, [0.3, 0.3 + 5e-9]])
def test_zero_variance_is_exactly_zero(std, rewards):
    assert advantages([rewards], std) == [[0.0] * len(rewards)]


@pytest.mark.parametrize("std", ["none", "group"])
def test_unscorable_samples_leave_the_statistics(std):
    with_nan, without = advantages([[1.0, NAN, 0.0, 0.5], [NAN, NAN], [NAN, 3.0]], std), \
        advantages([[1.0, 0.0, 0.5]], std)
    assert with_nan[0][1] == 0
    assert [with_nan[0][i] for i in (0, 2, 3)] == without[0]
    assert with_nan[1:] == [[0.0, 0.0], [0.0, 0.0]]


def test_other_normalisations_are_refused():
    with pytest.raises(ValueError, match="'none' or 'group', not 'batch'"):
        advantages([[1.0, 0.0]], "batch")


REWARDS = st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=6),
                   min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(REWARDS, st.sampled_from(["none", "group"]), st.integers(-16, 16).map(lambda n: n / 4))
def test_centred_blind_to_shifts_and_to_other_groups(rewards, std, shift):
    found = advantages(rewards, std)
    for group, values in zip(rewards, found, strict=True):
        assert sum(values) == pytest.approx(0, abs=1e-9)
        assert advantages([[r + shift for r in group]], std)[0] == pytest.approx(values, abs=1e-9)
        assert all((v > 0) == (r > sum(group) / len(group)) for r, v in
                   zip(group, values, strict=True))
