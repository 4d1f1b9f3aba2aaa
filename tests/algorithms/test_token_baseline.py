"""The optimal token baseline against its formula on padded arrays, and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_megatron.algorithms.advantages.pipeline import needed_columns
from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import load_objective
from grpo_megatron.errors import DataError
from tests.algorithms.evaluation import evaluated, flat

REWARDS = [1.0, 0.0, 0.25, 1.0]
LENGTHS = [3, 5, 2, 4]


def token_rows(seed: int, lengths: list[int], low: float, high: float) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(low, high, length).tolist() for length in lengths]


def case(**changes) -> dict:
    """One group of four samples; the second is the longest by one token."""
    old = token_rows(1, LENGTHS, -2.0, -0.05)
    shifts = token_rows(2, LENGTHS, -0.6, 0.6)
    rollout = []
    for logprobs, shift in zip(old, shifts, strict=True):
        rollout.append([a - b for a, b in zip(logprobs, shift, strict=True)])
    squares = []  # of the token's own probability, and a part of what the others can add
    for logprobs, shares in zip(old, token_rows(3, LENGTHS, 0.1, 1.0), strict=True):
        probs = np.exp(logprobs)
        squares.append((probs**2 + shares * (1 - probs) ** 2).tolist())
    document = {
        "rewards": REWARDS,
        "group_ids": [0] * 4,
        "logprobs": old,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "squared_probs": squares,
    }
    return document | changes


def padded(rows: list[list[float]]) -> np.ndarray:
    matrix = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(matrix, rows, strict=True):
        row[: len(values)] = values
    return matrix


def by_formula(document: dict, rho: np.ndarray | float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and mask of a single group, both [G, longest]."""
    lengths = [len(row) for row in document["old_logprobs"]]
    mask = padded([[1.0] * length for length in lengths])
    norms = 1 - 2 * np.exp(padded(document["old_logprobs"])) + padded(document["squared_probs"])
    energy = np.cumsum(norms * rho**2 * mask, axis=1) * mask
    returns = np.array(document["rewards"])[:, None] * mask
    baseline = (returns * energy).sum(0) / (energy.sum(0) + 1e-8)
    return (returns - baseline) * mask, mask


def compare(found: list[list[float]], expected: np.ndarray, mask: np.ndarray) -> None:
    for row, values, flags in zip(found, expected, mask, strict=True):
        assert row == pytest.approx(values[flags > 0].tolist(), abs=1e-7)


def test_advantages_are_those_of_the_formula():
    found = evaluated("otb", **case())["advantages"]
    compare(found, *by_formula(case()))
    assert found[1][4] == 0  # alone: its own reward is the baseline


def test_the_command_computes_a_case_in_a_file(tmp_path, capsys):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case()))
    arguments = ["objective", "eval", "--objective", "otb", str(file)]
    assert main(arguments) == 0
    compare(json.loads(capsys.readouterr().out)["advantages"], *by_formula(case()))
    without = case()
    del without["squared_probs"]
    file.write_text(json.dumps(without))
    assert main(arguments) != 0
    assert "objective otb needs squared_probs" in capsys.readouterr().err


def test_the_baseline_of_two_tokens_by_hand():
    """Squared norms 0.5 and 1 of the first sample, 0.25 and 0.5 of the second."""
    half = float(np.log(0.5))
    quarter = float(np.log(0.25))
    found = evaluated(
        "otb",
        rewards=[1.0, 0.0],
        group_ids=[0, 0],
        logprobs=[[half, quarter], [half, half]],
        squared_probs=[[0.5, 0.5], [0.25, 0.5]],
    )["advantages"]
    first = 0.5 / (0.5 + 0.25)
    second = 1.5 / (1.5 + 0.75)
    assert found[0] == pytest.approx([1 - first, 1 - second])
    assert found[1] == pytest.approx([-first, -second])


@pytest.mark.parametrize("mismatch", ["tis", "icepop", "tis_sequence"])
def test_importance_weights_enter_squared(mismatch):
    document = case()
    log_rho = padded(document["old_logprobs"]) - padded(document["rollout_logprobs"])
    rho = np.exp(log_rho)
    if mismatch == "tis":
        rho = np.minimum(rho, 1.2)
    elif mismatch == "icepop":
        rho = np.where((rho >= 0.5) & (rho <= 1.2), rho, 0.0)
    else:
        rho = np.minimum(np.exp(log_rho.sum(1, keepdims=True)), 1.2)
    overrides = [f"mismatch={mismatch}", "mismatch_max=1.2"]
    found = evaluated("otb", overrides, **document)["advantages"]
    compare(found, *by_formula(document, rho))


def test_the_tail_of_the_longest_sample_has_no_baseline_if_wanted():
    document = case(rewards=[1.0, 0.5, 0.25, 1.0])
    plain = evaluated("otb", **document)["advantages"]
    found = evaluated("otb", ["otb_zero_tail=true"], **document)["advantages"]
    assert plain[1][4] == 0
    assert found[1][4] == 0.5
    assert found[1][:4] == plain[1][:4]
    assert [found[i] for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]


def test_groups_do_not_see_each_other():
    one = case()
    other = case(rewards=[0.0, 1.0, 1.0, 0.5])
    both = {name: one[name] + other[name] for name in one} | {"group_ids": [0] * 4 + [1] * 4}
    found = evaluated("otb", **both)["advantages"]
    alone = evaluated("otb", **one)["advantages"] + evaluated("otb", **other)["advantages"]
    assert flat(found) == pytest.approx(flat(alone))


def test_a_group_of_one_has_no_baseline_and_equal_rewards_no_advantage():
    document = case(group_ids=[0, 1, 1, 2], rewards=[1.0, 0.5, 0.5, None])
    found = evaluated("otb", **document)["advantages"]
    assert found[0] == [1.0] * 3
    assert not any(found[1] + found[2] + found[3])


def test_unscorable_samples_are_in_no_baseline():
    document = case(rewards=[1.0, 0.0, None, 1.0])
    found = evaluated("otb", **document)["advantages"]
    without = {name: [v for i, v in enumerate(values) if i != 2] for name, values in case().items()}
    expected = evaluated("otb", **without)["advantages"]
    assert found[2] == [0.0] * 2
    assert flat([found[i] for i in (0, 1, 3)]) == pytest.approx(flat(expected))


def test_columns_and_what_is_missing():
    plain, _ = load_objective("otb", [])
    weighed, _ = load_objective("otb", ["mismatch=tis"])
    columns = {"old_logprobs", "squared_probs"}
    assert needed_columns(plain, weighs_kl=False) == columns
    assert needed_columns(weighed, weighs_kl=False) == columns | {"rollout_logprobs"}
    document = case()
    del document["squared_probs"]
    with pytest.raises(DataError, match="squared_probs is missing"):
        evaluated("otb", **document)


def test_a_sum_of_squared_probabilities_is_a_share():
    rows = case()["squared_probs"]
    rows[2][1] = 1.5
    with pytest.raises(DataError, match=r"squared_probs\[2\]\[1\] is 1.5, not within 0 and 1"):
        parse_case(case(squared_probs=rows))


@pytest.mark.parametrize(
    ("rewards", "zero_tail", "expected"),
    [
        ([1.0, 0.0, 1.0, 1.0], False, True),
        ([1.0] * 4, False, False),
        ([1.0] * 4, True, True),  # the tail of the longest sample
        ([0.0] * 4, True, False),
    ],
)
def test_which_groups_carry_a_signal(rewards, zero_tail, expected):
    config, _ = load_objective("otb", [f"otb_zero_tail={str(zero_tail).lower()}"])
    document = {name: case()[name] for name in ("group_ids", "logprobs")}
    group = parse_case(document | {"rewards": rewards}).batch
    assert carries_signal(config, group) is expected
