"""A step's own samples show an engine that computes something else than the trainer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.checks import logprob_check
from tests.controller.scored_groups import recipe

LENGTHS = np.array([40, 3, 25, 40, 0, 12])
GROUPS = np.array([0, 3, 1, 2, 1, 3])
TABLE = SimpleNamespace(
    group=GROUPS,
    policy_lengths=LENGTHS,
    manifest=SimpleNamespace(engines=["rollout-10", "rollout-1", "rollout-2", "rollout-7"]),
)
EXACT = {"trainer": {"precision": "float32"}, "rollout": {"dtype": "float32"}}


def measured(
    gap: dict[int, float],
    config: RunConfig,
    splits=((0, 1, 2), (3, 4, 5)),
    token: int | None = None,
) -> Stats:
    """The step in micro-batches; every token (or one) of sample `row` is `gap[row]` apart."""
    total = Stats()
    for rows in splits:
        gaps = torch.cat([torch.full((LENGTHS[row],), gap.get(row, 0.0)) for row in rows])
        if token is not None:
            gaps[torch.arange(len(gaps)) != token] = 0.0
        signs = torch.randint(0, 2, gaps.shape) * 2 - 1
        logprobs = -2 + torch.randn(gaps.shape)
        total.add(logprob_check.compare(config, TABLE, np.array(rows), logprobs, signs * gaps))
    return total


def test_engines_that_agree():
    stats = measured(dict.fromkeys(range(6), 5e-05), recipe(**EXACT))
    assert logprob_check.disagreement(recipe(**EXACT), TABLE, stats) == ""
    assert set(stats.result()) == {"canary/abs_mean", "canary/abs_max"} == set(stats.units)
    assert stats.result()["canary/abs_max"] == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize("splits", [((0, 1, 2), (3, 4, 5)), ((5, 3), (4,), (1,), (0, 2))])
def test_one_wrong_engine_of_four_is_named(splits):
    """Over all engines the mean stays within the tolerance: each is looked at by itself."""
    stats = measured({2: 1.5e-4}, recipe(**EXACT), splits)
    assert stats.result()["canary/abs_mean"] < 1e-4
    problem = logprob_check.disagreement(recipe(**EXACT), TABLE, stats)
    assert problem.startswith("rollout-1 and the trainer disagree") and "rollout-2" not in problem


def test_a_token_between_two_experts_is_no_problem():
    stats = measured({0: 0.3}, recipe(**EXACT), token=7)
    assert logprob_check.disagreement(recipe(**EXACT), TABLE, stats) == ""
    assert stats.result()["canary/abs_max"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (EXACT, 1e-4),
        (EXACT | {"rollout": {"dtype": "bfloat16"}}, 0.1),
        (EXACT | {"trainer": {"precision": "bfloat16", "fp8": "blockwise"}}, 0.3),
        (EXACT | {"publish": {"canary_tolerance": 0.01}}, 0.01),
    ],
)
def test_tolerances(settings, tolerance):
    for gap, expected in ((0.9 * tolerance, False), (1.1 * tolerance, True)):
        stats = measured(dict.fromkeys(range(6), gap), recipe(**settings))
        assert bool(logprob_check.disagreement(recipe(**settings), TABLE, stats)) == expected


ROUNDED = {"rollout": {"dtype": "bfloat16"}}


def unrelated(spread: float, related: float) -> Stats:
    """Log-probs of two models that differ by `spread` from token to token; the second model's are
    `related` times the first's, and for the rest its own."""
    generator = torch.Generator().manual_seed(0)
    rows = np.array([2])
    own, other = spread * torch.randn(2, int(LENGTHS[2]), generator=generator)
    difference = own - (related * own + (1 - related**2) ** 0.5 * other)
    return logprob_check.compare(recipe(**ROUNDED), TABLE, rows, own - 5.8, difference)


@pytest.mark.parametrize(
    ("spread", "related", "is_told"),
    [
        (0.06, 0.0, True),  # within 0.1 on average, and another model
        (0.06, 0.5, True),
        (0.06, 0.95, False),
        (0.005, 0.0, False),  # all tokens are equally likely
    ],
)
def test_a_model_that_has_nothing_in_common(spread, related, is_told):
    stats = unrelated(spread, related)
    assert stats.result()["canary/abs_mean"] < recipe(**ROUNDED).canary_tolerance
    problem = logprob_check.disagreement(recipe(**ROUNDED), TABLE, stats)
    assert ("rollout-1" in problem and "nothing in common" in problem) is is_told
    assert set(stats.result()) == {"canary/abs_mean", "canary/abs_max"}


def test_a_few_tokens_say_nothing_of_their_spread():
    logprobs = torch.full((3,), -5.0)
    gaps = torch.full((3,), 0.05)
    stats = logprob_check.compare(recipe(**ROUNDED), TABLE, np.array([1]), logprobs, gaps)
    assert logprob_check.disagreement(recipe(**ROUNDED), TABLE, stats) == ""


def test_what_is_no_number_is_a_problem():
    stats = measured({3: float("nan")}, recipe(**EXACT))
    assert "rollout-2" in logprob_check.disagreement(recipe(**EXACT), TABLE, stats)


@pytest.mark.parametrize(
    ("tables", "prove"),
    [
        ({}, True),
        ({"publish": {"canary": False}}, False),
        ({"routing": {"replay": "r2"}}, True),
        ({"routing": {"replay": "r3"}}, False),
        ({"batch": {"max_staleness": 1}}, False),
        ({"objective": {"overlong": "loss"}}, False),
        ({"objective": {"subset": "shortest"}}, False),
        ({"rollout": {"top_k": 8}}, False),
        ({"rollout": {"num_replicas": 2}}, True),
        ({"rollout": {"num_replicas": 2, "deterministic": True}}, False),
        ({"rollout": {"deterministic": True}}, True),
    ],
)
def test_when_samples_prove(tables, prove):
    """Not where the trainer computes what the engine chose, right or wrong (replayed experts), or
    nothing for some samples; nor where a group's samples come from several engines."""
    config = recipe()
    for table, values in tables.items():
        config = config.model_copy(update={table: getattr(config, table).model_copy(update=values)})
    assert config.can_verify_from_samples is prove, json.dumps(tables)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_samples_of_several_rounds_prove_where_there_is_one_engine(num_replicas):
    rollout = {"num_replicas": num_replicas}
    config = recipe(allocation={}, seeding={}, rollout=rollout)
    assert config.can_verify_from_samples is (num_replicas == 1)
