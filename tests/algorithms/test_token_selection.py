"""Tokens that are chosen over a whole optimizer step: by entropy, and by covariance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.advantages.pipeline import needed_columns
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.batch import Advantages
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.evaluate import evaluate
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.token_selection import covariant_tokens, low_entropy_tokens
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.passes import loss_columns
from grpo_megatron.errors import DataError
from tests.algorithms.evaluation import evaluated, flat, same

LN2 = math.log(2.0)
TWELVE = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]]


def case(entropies: list[list[float]], **more: Any) -> dict[str, Any]:
    """Samples of two groups in turn, all tokens with probability 1/2, advantages 1 and -1."""
    size = len(entropies)
    return {
        "advantages": [1.0 if i % 2 == 0 else -1.0 for i in range(size)],
        "group_ids": [i // 2 for i in range(size)],
        "logprobs": [[-LN2] * len(row) for row in entropies],
        "entropies": entropies,
        **more,
    }


def trained(found: dict[str, Any]) -> list[list[int]]:
    """Places of the tokens with a gradient, by sample."""
    return [[t for t, g in enumerate(row) if g] for row in found["grad_logprobs"]]


# --- entropy


def test_the_top_fifth_of_ten_tokens():
    """Two of ten: the quantile lies between the eighth and the ninth entropy."""
    document = case(TWELVE, loss_mask=[[1] * 6, [1, 1, 1, 1, 0, 0]])
    found = evaluated("grpo", ["top_entropy_share=0.2"], **document)
    assert trained(found) == [[], [2, 3]]
    assert found["metrics"]["rejected/low_entropy_fraction"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),
        (0.75, [[3, 4, 5], [0, 1, 2, 3, 4, 5]]),
        (0.5, [[], [0, 1, 2, 3, 4, 5]]),
        (0.01, [[], [5]]),
    ],
)
def test_shares_of_twelve_tokens(share, expected):
    assert trained(evaluated("grpo", [f"top_entropy_share={share}"], **case(TWELVE))) == expected


def test_kept_tokens_keep_their_weight():
    """Denominators count all tokens."""
    whole = evaluated("dapo", **case(TWELVE))["grad_logprobs"]
    found = evaluated("dapo", ["top_entropy_share=0.5"], **case(TWELVE))["grad_logprobs"]
    assert found[1] == whole[1] == [pytest.approx(1 / 12)] * 6
    assert found[0] == [0.0] * 6


def test_only_the_surrogate_is_left_out():
    """KL and entropy bonus hold at every token."""
    regularised = ["kl=k2", "kl_beta=0.1", "entropy_weight=0.01", "aggregation=token_mean"]
    ref = {"ref_logprobs": [[-LN2 + 0.5] * 6, [-LN2 - 0.5] * 6]}
    found = evaluated("grpo", [*regularised, "top_entropy_share=0.5"], **case(TWELVE, **ref))
    kl = 0.1 * 0.5**2 / 2
    bonus = 0.01 * np.mean(TWELVE)
    same(found["loss"], 6 / 12 + kl - bonus)  # of the wrong sample: -(r A) = 1
    same(found["grad_logprobs"][0], [-0.1 * 0.5 / 12] * 6)


def test_equal_entropies_are_all_trained():
    found = evaluated("grpo", ["top_entropy_share=0.2"], **case([[0.3] * 3, [0.3] * 2]))
    assert trained(found) == [[0, 1, 2], [0, 1]]


def test_entropies_that_rounding_parts_are_equal():
    """The lower of a pair, at the quantile, of samples that begin alike."""
    close = 0.3 - 1e-6
    found = evaluated("grpo", ["top_entropy_share=0.2"], **case([[0.1, 0.3], [0.1, close]]))
    assert trained(found) == [[1], [1]]


@pytest.mark.parametrize(
    ("entropies", "more"),
    [
        ([[0.5]], {}),
        ([[0.5], []], {}),
        ([[0.5, 0.4]], {"loss_mask": [[0, 0]]}),
    ],
)
def test_one_token_none_and_all_masked(entropies, more):
    found = evaluated("grpo", ["top_entropy_share=0.2"], **case(entropies, **more))
    assert np.isfinite(flat(found["grad_logprobs"])).all()
    has_token = not more
    assert any(flat(found["grad_logprobs"])) == has_token


def test_the_step_is_what_the_share_is_of():
    """Of the two groups only the first is trained in this optimizer step."""
    parsed = parse_case(case([[0.1, 0.2], [0.3, 0.4], [9.0, 9.0], [9.0, 9.0]]))
    config = ObjectiveConfig(preset="grpo", top_entropy_share=0.5)
    found = low_entropy_tokens(config, parsed.batch, torch.tensor([0, 1]))
    assert found.tolist() == [True, True, False, False, False, False, False, False]


def test_every_domain_has_its_share():
    document = case([[0.1, 0.2], [0.3, 0.4], [7.0, 8.0], [9.0, 10.0]], domains=["a", "a", "b", "b"])
    share = ["top_entropy_share=0.5"]
    assert trained(evaluated("grpo", share, **document)) == [[], [0, 1], [], [0, 1]]
    coupled = evaluated("grpo", [*share, "statistics_scope=global"], **document)
    assert trained(coupled) == [[], [], [0, 1], [0, 1]]


def test_the_case_needs_entropies():
    document = case(TWELVE)
    del document["entropies"]
    with pytest.raises(DataError, match="entropies is missing"):
        evaluated("grpo", ["top_entropy_share=0.5"], **document)


def test_columns_of_the_loss_are_none_of_the_advantages():
    config, _ = load_objective("high_entropy")
    assert loss_columns(config) == {"entropies"}
    assert needed_columns(config, weighs_kl=False) == set()
    config, _ = load_objective("kl_cov")
    assert loss_columns(config) == {"old_logprobs"}
    config, _ = load_objective("grpo")
    assert loss_columns(config) == set()


# --- covariance

OLD = [[-0.1, -0.2, -3.0], [-0.3, -4.0]]
ADVANTAGES = [2.0, -1.0]


def covariances() -> list[float]:
    """`(log pi_old - mean) (A - mean)` of the five tokens, over all of them."""
    logprobs = OLD[0] + OLD[1]
    advantages = [2.0, 2.0, 2.0, -1.0, -1.0]
    mean_logprob = sum(logprobs) / 5
    mean_advantage = sum(advantages) / 5
    return [
        (logprob - mean_logprob) * (advantage - mean_advantage)
        for logprob, advantage in zip(logprobs, advantages, strict=True)
    ]


def covariance_case(ratio: float = 1.0) -> dict[str, Any]:
    return {
        "advantages": ADVANTAGES,
        "group_ids": [0, 0],
        "old_logprobs": OLD,
        "logprobs": [[value + math.log(ratio) for value in row] for row in OLD],
    }


def chosen(clip: str, **settings: Any) -> list[int]:
    parsed = parse_case(covariance_case())
    config = ObjectiveConfig(preset=clip, **settings)
    advantages = Advantages(torch.tensor(ADVANTAGES).double(), per_token=False)
    found = covariant_tokens(config, parsed.batch, advantages, torch.tensor([0, 1]))
    return found.nonzero()[:, 0].tolist()


def test_covariances_by_hand():
    """mean log-prob -1.52, mean advantage 0.8"""
    same(covariances(), [1.704, 1.584, -1.776, -2.196, 4.464])


@pytest.mark.parametrize(("share", "expected"), [(1e-4, [4]), (0.4, [0, 4]), (0.6, [0, 1, 4])])
def test_kl_cov_takes_the_highest(share, expected):
    assert chosen("kl_cov", covariance_share=share) == expected


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((1.0, 5.0), {0, 1, 4}), ((1.6, 4.0), {0}), ((1.5, 1.7), {1}), ((5.0, 6.0), set())],
)
def test_clip_cov_takes_what_is_between_its_bounds(bounds, expected):
    """All of them with a share of 1, any one of them with the smallest."""
    low, high = bounds
    settings = {"covariance_min": low, "covariance_max": high}
    inside = chosen("clip_cov", covariance_share=1.0, **settings)
    assert set(inside) == expected
    one = chosen("clip_cov", covariance_share=1e-4, **settings)
    assert len(one) == min(1, len(expected))
    assert set(one) <= expected


def test_clip_cov_by_hand():
    """Of five tokens all three between the bounds lose their term; ratio 1.5, clip 0.2."""
    settings = ["covariance_share=1.0", "clip_low=0.2", "clip_high=0.2"]
    found = evaluated("clip_cov", settings, **covariance_case(1.5))
    same(found["loss"], -(1.2 * 2 + 1.5 * -1) / 5)
    same(found["grad_logprobs"], [[0, 0, 0], [1.5 / 5, 0]])
    assert found["metrics"]["clip/covariance_fraction"] == pytest.approx(3 / 5)
    assert found["metrics"]["clip/high_fraction"] == pytest.approx(3 / 5)
    assert found["metrics"]["clip/region_fraction"] == pytest.approx(4 / 5)


def test_kl_cov_by_hand():
    """The two highest pay `|log r|`, nobody is clipped."""
    settings = ["covariance_share=0.4", "covariance_penalty=0.7"]
    found = evaluated("kl_cov", settings, **covariance_case(1.5))
    surrogate = 1.5 * (2 + 2 + 2 - 1 - 1)
    same(found["loss"], -(surrogate - 0.7 * 2 * math.log(1.5)) / 5)
    same(
        found["grad_logprobs"],
        [[(-3 + 0.7) / 5, -3 / 5, -3 / 5], [1.5 / 5, (1.5 + 0.7) / 5]],
    )
    below = evaluated("kl_cov", settings, **covariance_case(0.5))
    same(below["grad_logprobs"][0][0], (-0.5 * 2 - 0.7) / 5)


def test_kl_cov_costs_nothing_on_policy():
    found = evaluated("kl_cov", ["covariance_share=1.0"], **covariance_case(1.0))
    same(found["loss"], -4 / 5)
    same(found["grad_logprobs"], [[-2 / 5] * 3, [1 / 5] * 2])


@pytest.mark.parametrize("preset", ["clip_cov", "kl_cov"])
def test_recorded_choices_are_followed(preset):
    """Another choice than the present one, as after a step of another layout."""
    config, own = load_objective(preset, ["covariance_share=0.2", "clip_low=0.2", "clip_high=0.2"])
    objective = Objective(config, own=own)
    parsed = parse_case(covariance_case(1.1))
    nothing = {name: torch.zeros(5, dtype=torch.bool) for name in ("low", "high")}
    recorded = nothing | {"covariance": torch.tensor([True, False, False, False, False])}
    found = evaluate_replayed(objective, parsed, recorded)
    of_first = 0.0 if preset == "clip_cov" else (-2.2 + 1.0) / 5
    same(found.tolist(), [of_first, -2.2 / 5, -2.2 / 5, 1.1 / 5, 1.1 / 5])


def evaluate_replayed(objective: Objective, parsed: Any, recorded: dict) -> torch.Tensor:
    """The gradient of a case as one micro-batch that follows recorded masks, [n]."""
    rows = torch.arange(len(parsed.batch))
    constants = loss_constants(objective, parsed.batch, parsed.advantages, rows, 8)
    leaf = parsed.columns["logprobs"].clone().requires_grad_()
    batch = constants.loss_batch(
        rows,
        logprobs=leaf,
        old_logprobs=parsed.columns["old_logprobs"],
        rollout_logprobs=parsed.columns["rollout_logprobs"],
        entropies=torch.zeros_like(leaf),
        replayed_masks=recorded,
    )
    loss, _ = policy_loss(objective, batch)
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return gradient


def test_recorded_low_entropies_are_followed():
    config, own = load_objective("grpo", ["top_entropy_share=0.5"])
    parsed = parse_case(case([[0.1, 0.2], [0.3, 0.4]]))
    recorded = {"low_entropy": torch.tensor([False, True, True, False])}
    found = evaluate_replayed(Objective(config, own=own), parsed, recorded)
    assert (found != 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("preset", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize(
    "document",
    [
        {"advantages": [1.0], "group_ids": [0], "logprobs": [[-0.5]]},
        {"advantages": [1.0, 2.0], "group_ids": [0, 0], "logprobs": [[], []]},
        {
            "advantages": [1.0],
            "group_ids": [0],
            "logprobs": [[-0.5, -0.2]],
            "loss_mask": [[0, 0]],
        },
        {
            "advantages": [1.0, -1.0],
            "group_ids": [0, 0],
            "logprobs": [[-0.5, -0.2], [-0.1]],
            "old_logprobs": [[-math.inf, -0.2], [-0.1]],
        },
    ],
)
def test_one_token_none_all_masked_and_an_infinite_one(preset, document):
    found = evaluated(preset, ["covariance_share=1.0", "covariance_min=-9"], **document)
    assert math.isfinite(found["loss"])
    assert np.isfinite(flat(found["grad_logprobs"])).all()


def test_chance_does_not_depend_on_the_order_of_samples():
    """The hash is of sample and place; another sample, another chance."""
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.0, (8, 50))
    settings = {"covariance_share": 0.05, "covariance_min": 0.0, "covariance_max": 9.0}
    config = ObjectiveConfig(preset="clip_cov", **settings)

    def chosen_by_sample(order: list[int]) -> dict[int, list[int]]:
        parsed = parse_case(
            {
                "advantages": [float((-1) ** i) for i in order],
                "group_ids": [0] * 8,
                "sample_ids": order,
                "logprobs": [old[i].tolist() for i in order],
            }
        )
        rows = torch.arange(8)
        found = covariant_tokens(config, parsed.batch, parsed.advantages, rows)
        assert int(found.sum()) == 20
        return {
            sample: part.nonzero()[:, 0].tolist()
            for sample, part in zip(order, found.split(50), strict=True)
        }

    first = chosen_by_sample(list(range(8)))
    assert chosen_by_sample([5, 2, 7, 0, 1, 6, 3, 4]) == first
    assert len({tuple(places) for places in first.values()}) > 4


def test_advantages_of_tokens_have_their_own_covariance():
    config = ObjectiveConfig(preset="kl_cov", covariance_share=0.2)
    parsed = parse_case(covariance_case())
    of_tokens = Advantages(torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0]).double(), per_token=True)
    found = covariant_tokens(config, parsed.batch, of_tokens, torch.tensor([0, 1]))
    assert found.tolist() == [True, False, False, False, False]


def test_the_split_into_micro_batches_changes_nothing():
    config, own = load_objective("clip_cov", ["covariance_share=0.4", "top_entropy_share=0.6"])
    document = covariance_case(1.3) | {"entropies": [[0.5, 0.1, 0.9], [0.3, 0.7]]}
    parsed = parse_case(document)
    objective = Objective(config, own=own)
    whole = evaluate(objective, parsed.batch, parsed.columns, advantages=parsed.advantages)
    parts = [torch.tensor([1]), torch.tensor([0])]
    split = evaluate(
        objective, parsed.batch, parsed.columns, advantages=parsed.advantages, parts=parts
    )
    assert torch.equal(split.gradient, whole.gradient)
    assert split.loss == pytest.approx(whole.loss, rel=1e-14)
