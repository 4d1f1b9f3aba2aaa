"""Edge cases have defined results, bad cases clear messages; nothing is ever NaN."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS
from grpo_megatron.algorithms.advantages.pipeline import advantages_of, needed_columns
from grpo_megatron.algorithms.aggregation import (
    AGGREGATIONS,
    Lengths,
    loss_constants,
    with_preference,
)
from grpo_megatron.algorithms.case import parse_case, read_case
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import PRESETS
from grpo_megatron.errors import ConfigError, DataError
from tests.algorithms.evaluation import evaluated, flat

BASE = {
    "rewards": [1, 0, 1, 0],
    "group_ids": [0, 0, 1, 1],
    "logprobs": [[-1.0, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5, -1.0]],
    "ref_logprobs": [[-1.1, -0.6], [-1.9], [-0.3, -0.3, -0.1], [-1.4, -1.2]],
    "entropies": [[0.5, 0.2], [0.3], [0.1, 0.2, 0.6], [0.4, 0.4]],
    "squared_probs": [[0.4, 0.5], [0.2], [0.6, 0.7, 0.8], [0.2, 0.3]],
    "values": [[0.5, 0.9], [0.4], [0.2, 0.4, 0.8], [0.5, 0.1]],
    "token_ids": [[1, 2], [1], [2, 2, 3], [2, 3]],
    "components": {"a": [1, 0, 1, 0]},
    "turns": [
        [{"end": 1, "reward": 1, "state": "s"}],
        [{"end": 0, "reward": 0, "state": "s"}],
        [{"end": 2, "reward": 1, "state": "s"}],
        [{"end": 1, "reward": 0, "state": "s"}],
    ],
}


def variant(**changes) -> dict:
    return {**BASE, **changes}


EDGES = {
    "all rewards equal": variant(rewards=[1, 1, 0, 0], components={"a": [1, 1, 0, 0]}),
    "groups of one": variant(group_ids=[0, 1, 2, 3]),
    "no reward at all": variant(rewards=[None] * 4, components={"a": [None] * 4}),
    "one unscorable": variant(rewards=[float("nan"), 0, 1, 0]),
    "everything masked": variant(loss_mask=[[0, 0], [0], [0, 0, 0], [0, 0]], turns=[[]] * 4),
    "an empty response": variant(
        logprobs=[[-1.0, -0.5], [], [-0.3, -0.2, -0.1], [-1.5, -1.0]],
        ref_logprobs=[[-1.1, -0.6], [], [-0.3, -0.3, -0.1], [-1.4, -1.2]],
        entropies=[[0.5, 0.2], [], [0.1, 0.2, 0.6], [0.4, 0.4]],
        squared_probs=[[0.4, 0.5], [], [0.6, 0.7, 0.8], [0.2, 0.3]],
        values=[[0.5, 0.9], [], [0.2, 0.4, 0.8], [0.5, 0.1]],
        token_ids=[[1, 2], [], [2, 2, 3], [2, 3]],
        turns=[BASE["turns"][0], [], *BASE["turns"][2:]],
    ),
    "an infinite log-prob": variant(
        old_logprobs=[[-math.inf, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5, -1.0]]
    ),
    "an infinite engine log-prob": variant(
        rollout_logprobs=[[-1.0, -0.5], [-math.inf], [-0.3, -0.2, -0.1], [-1.5, -1.0]]
    ),
    "a far engine log-prob": variant(
        rollout_logprobs=[[-900.0, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5, -1.0]]
    ),
    "a far reference": variant(
        ref_logprobs=[[-1.1, -0.6], [-1200.0], [-0.3, -0.3, -0.1], [-1.4, -1.2]]
    ),
    "far ratios": variant(old_logprobs=[[-90.0, -0.5], [-80.0], [-0.3, -70.0, -0.1], [-1.5, -1.0]]),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("edge", EDGES)
def test_nothing_is_ever_nan(preset, edge):
    extra = ["subset_size=1"] if preset == "gfpo" else []
    found = evaluated(preset, extra, **EDGES[edge])
    assert math.isfinite(found["loss"])
    assert np.isfinite(flat(found["grad_logprobs"])).all()
    assert np.isfinite(flat(found["advantages"])).all()
    numbers = [v for v in found["metrics"].values() if v is not None]
    assert np.isfinite(numbers).all()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_sample_without_a_reward_has_no_advantage(name):
    """Already behind the estimator: what follows counts on it."""
    parsed = parse_case(variant(rewards=[1, 0, float("nan"), 0], group_ids=[0] * 4))
    config, _ = load_objective("grpo", [], parsed.domains)
    config = config.model_copy(update={"advantage": name, "passk_k": 2})
    batch = parsed.batch
    found = ESTIMATORS[name](config, batch, Groups(batch.group_ids, batch.valid))
    if len(found) > len(batch):
        found = batch.sums(found.abs())
    assert found[2] == 0
    assert bool(found.any())


def test_defined_results_and_counts():
    found = evaluated("dapo", **EDGES["no reward at all"])
    assert not any(flat(found["advantages"])) and found["loss"] == 0
    assert found["metrics"]["batch/unscorable"] == 4
    found = evaluated("dapo", **EDGES["one unscorable"])
    assert found["advantages"][:2] == [0, 0] and found["advantages"][2] > 0
    found = evaluated("dapo", **EDGES["an infinite log-prob"])
    assert found["metrics"]["tokens/infinite_fraction"] == 1 / 8
    assert found["grad_logprobs"][0][0] == 0 != found["grad_logprobs"][0][1]
    found = evaluated("dapo", **EDGES["an empty response"])
    assert found["metrics"]["batch/empty_responses"] == 1
    assert found["advantages"][0] > 0  # its reward still counts
    found = evaluated("dapo", **EDGES["everything masked"])
    assert found["loss"] == 0 and not any(flat(found["grad_logprobs"]))
    assert found["grad_logprobs"][2] == [0, 0, 0]


@pytest.mark.parametrize(
    ("how", "not_trained", "advantage"), [("none", 0, True), ("loss", 1, True), ("drop", 1, False)]
)
def test_the_overlong_filter(how, not_trained, advantage):
    """loss: the truncated sample still is in the statistics of its group; drop: it is not."""
    found = evaluated(
        "dr_grpo",
        [f"overlong={how}", "aggregation=token_mean"],
        **variant(truncated=[0, 1, 0, 0]),
    )
    assert found["metrics"]["batch/not_trained"] == not_trained
    assert (found["advantages"][0] > 0) == advantage
    assert any(found["grad_logprobs"][1]) == (how == "none")
    weight = 1 / (8 - not_trained)  # the truncated sample has one token
    assert found["grad_logprobs"][2][0] == pytest.approx(-0.5 * weight)


def test_samples_zeroed_by_a_mask_still_count_in_the_denominator():
    """OPSM rejects a sample; the others keep their weights."""
    case = variant(rollout_logprobs=[[-1.0, -0.5], [-0.5], [-0.3, -0.2, -0.1], [-1.5, -1.0]])
    plain = evaluated("grpo", **case)["grad_logprobs"]
    found = evaluated("grpo", ["off_policy_mask=opsm", "opsm_delta=0.5"], **case)
    assert found["grad_logprobs"][1] == [0] and plain[1] != [0]
    assert found["grad_logprobs"][0] == plain[0]
    assert found["metrics"]["rejected/opsm_sample_fraction"] == 0.25


@pytest.mark.parametrize("scope", ["domain", "global"])
def test_opsm_without_a_threshold_is_calibrated_per_domain(scope):
    case = variant(
        domains=["a", "a", "b", "b"],
        rollout_logprobs=[[-1.0, -0.5], [-1.98], [-0.3, -0.2, -0.1], [-0.5, -1.0]],
    )
    metrics = evaluated("deepseek_v3_2", [f"statistics_scope={scope}"], **case)["metrics"]
    assert metrics["opsm/calibrated_delta@a"] == pytest.approx(5 * 0.02 * 0.99, rel=0.05)
    assert metrics["opsm/calibrated_delta@b"] == 0.5  # bounded
    assert metrics["rejected/opsm_fraction"] == 0


def test_the_preference_loss_is_exact():
    """Gradient of -log sigmoid(beta (m_best - m_worst)) by finite differences."""
    overrides = ["preference_weight=1.0", "preference_beta=0.7", "clip=none"]

    def loss(first: float) -> float:
        case = {
            "rewards": [1, 0],
            "group_ids": [0, 0],
            "logprobs": [[first, -0.4], [-1.0]],
            "ref_logprobs": [[-1.2, -0.5], [-0.9]],
        }
        both = evaluated("dr_grpo", overrides, **case)
        alone = evaluated("dr_grpo", ["clip=none"], **case)
        return both["loss"] - alone["loss"], (
            both["grad_logprobs"][0][0] - alone["grad_logprobs"][0][0]
        )

    (above, _), (below, _), (_, gradient) = loss(-1.0 + 1e-6), loss(-1.0 - 1e-6), loss(-1.0)
    assert gradient == pytest.approx((above - below) / 2e-6, rel=1e-6)


def test_the_preference_loss_is_of_the_samples_of_its_step():
    """Of two groups, one is trained in this step; a subset leaves out the worst sample."""
    parsed = parse_case(BASE)
    config, _ = load_objective("grpo", ["preference_weight=1.0"])
    objective = Objective(config, parsed.domains)
    advantages = advantages_of(objective, parsed.batch)
    rows = torch.tensor([0, 1])
    constants = loss_constants(objective, parsed.batch, advantages, rows, 8)
    constants = with_preference(constants, objective, torch.zeros(4).double())
    slope, value = constants.preference
    assert slope.tolist() == [-0.05, 0.05, 0, 0]
    assert value.tolist() == [pytest.approx(math.log(2)), 0, 0, 0]
    alone = evaluated("gfpo", ["subset_size=1"], **BASE)
    found = evaluated("gfpo", ["subset_size=1", "preference_weight=1.0"], **BASE)
    assert (found["loss"], found["grad_logprobs"]) == (alone["loss"], alone["grad_logprobs"])


def test_an_infinite_log_prob_has_no_part_in_the_preference_loss():
    found = evaluated("grpo", ["preference_weight=1.0"], **EDGES["an infinite log-prob"])
    assert math.isfinite(found["loss"])
    assert found["grad_logprobs"][0][0] == 0 != found["grad_logprobs"][0][1]


def test_the_margin_of_a_preference_is_of_the_tokens_in_its_loss():
    """The engine does not know the second token: without it the best answer is 0.5 ahead by its
    first, and the other one 1 behind."""
    case = {
        "logprobs": [[-1.0, -4.0], [-2.0]],
        "ref_logprobs": [[-1.5, -1.0], [-1.0]],
        "rollout_logprobs": [[-1.0, -math.inf], [-2.0]],
        "rewards": [1, 0],
    }
    plain = evaluated("grpo", **case)["loss"]
    settings = ["preference_weight=1", "preference_beta=1.0"]
    found = evaluated("grpo", settings, **case)
    assert found["loss"] - plain == pytest.approx(math.log1p(math.exp(-1.5)))
    pull = 1 / (1 + math.exp(1.5))
    without = evaluated("grpo", **case)["grad_logprobs"]
    assert found["grad_logprobs"][0] == pytest.approx([without[0][0] - pull, 0])
    assert found["grad_logprobs"][1] == pytest.approx([without[1][0] + pull])


def test_the_exponent_of_lambda_grpo_learns_nothing_from_what_is_left_out():
    """The slope of the weights times the losses of the tokens that are in the loss."""
    case = {
        "logprobs": [[-1.0, -1.0, -1.0], [-2.0]],
        "rewards": [1, 0],
    }
    infinite = {**case, "old_logprobs": [[-1.0, -1.0, -math.inf], [-2.0]]}
    gradients = []
    for document in (case, infinite):
        settings = ["lambda_init=0.5", "advantage_std=none"]
        found = evaluated("lambda_grpo", settings, **document)
        gradients.append(found["metrics"]["lambda/gradient"])
    counts = torch.tensor([3, 1])
    lengths = Lengths(counts.numpy(), np.zeros(2, np.int64), 1, 0.5)
    _, slopes = AGGREGATIONS["lambda_grpo"](load_objective("lambda_grpo", [])[0], lengths)
    assert gradients[0] == pytest.approx(-0.5 * 3 * slopes[0] + 0.5 * slopes[1])
    assert gradients[1] == pytest.approx(-0.5 * 2 * slopes[0] + 0.5 * slopes[1])


def test_the_score_of_xrpo_is_of_the_finite_tokens():
    case = {"logprobs": [[-1.0], [-1.0], [-3.0, -3.0]], "rewards": [1, 0, 1]}
    known = evaluated("xrpo", ["xrpo_kappa=10"], **case)["advantages"]
    infinite = {**case, "old_logprobs": [[-1.0], [-1.0], [-3.0, -math.inf]]}
    assert evaluated("xrpo", ["xrpo_kappa=10"], **infinite)["advantages"] == known


def test_the_subset_is_chosen_by_shaped_rewards():
    """The same samples count in the statistics and in the loss."""
    case = {
        "rewards": [1, 1, 1, 0.9],
        "group_ids": [0] * 4,
        "logprobs": [[-1.0] * n for n in (2, 3, 3, 2)],
    }
    found = evaluated("gfpo", ["reward_shaping=per_token", "subset_size=2"], **case)
    trained = [any(row) for row in found["grad_logprobs"]]
    assert trained == [a != 0 for a in found["advantages"]] == [True, False, False, True]


def test_component_weights_are_exact():
    found = evaluated(
        "mo_grpo",
        ["std_kind=population", "advantage_eps=0"],
        rewards=[0, 0],
        group_ids=[0, 0],
        logprobs=[[-1.0]] * 2,
        components={"a": [1, 0]},
        component_weights={"a": 0.7},
    )
    assert found["advantages"] == [0.7, -0.7]


def test_a_kl_weight_of_one_domain_asks_for_its_columns():
    config, own = load_objective("grpo", ["kl=reward_k1", "domain.a.kl_beta=0.1"], ("a", "b"))
    objective = Objective(config, ("a", "b"), own)
    assert needed_columns(config, weighs_kl=objective.weighs_kl) == {"old_logprobs", "ref_logprobs"}


def test_gagpo_by_hand():
    """Two rollouts share the first state; V(s) is the mean of its returns."""
    case = {
        "rewards": [0, 0],
        "group_ids": [0, 0],
        "logprobs": [[-1.0] * 3, [-1.0] * 2],
        "turns": [[[0, 0.0, "s"], [2, 1.0, "t"]], [[1, 0.0, "s"]]],
    }
    found = evaluated(
        "gagpo", ["gagpo_lambda=1.0", "std_kind=population", "advantage_eps=0"], **case
    )["advantages"]
    # V(s) = 1/2, V(t) = 1: advantages of the turns 1/2, 0, -1/2
    z = 0.5 / math.sqrt(1 / 6)
    np.testing.assert_allclose(flat(found), [z, 0, 0, -z, -z], atol=1e-12)


def test_length_switch_by_hand():
    """Only the most successful fifth of the groups pays for length."""
    rewards = [[1, 1, 1], *[[1, 0, 0]] * 4]
    groups = [g for g, row in enumerate(rewards) for _ in row]
    found = evaluated(
        "grpo_lambda_length",
        ["advantage_std=none", "length_switch_weight=0.5", "advantage_eps=0"],
        rewards=[r for row in rewards for r in row],
        group_ids=groups,
        logprobs=[[-1.0] * n for n in (2, 4, 6)] + [[-1.0] * 3] * 12,
    )["advantages"]
    z = 1 / math.sqrt(2 / 3)
    paid = [1 - 0.5 / (1 + math.exp(z)), 0.75, 1 - 0.5 / (1 + math.exp(-z))]
    np.testing.assert_allclose(found[:3], np.array(paid) - np.mean(paid), atol=1e-12)
    np.testing.assert_allclose(found[3:6], [2 / 3, -1 / 3, -1 / 3])


BAD_CASES = [
    (variant(logprobs=[]), "logprobs", "no samples"),
    (variant(logprobs=None), "logprobs", "missing"),
    (variant(rewards=[1, 0]), "rewards", "2 entries"),
    (variant(rewards=[1, "x", 1, 0]), "rewards[1]", "not a number"),
    (variant(rewards=[1, math.inf, 1, 0]), "rewards[1]", "infinite"),
    (variant(logprobs=[[-1.0, math.nan], [-2.0], [-0.3] * 3, [-1.5] * 2]), "logprobs[0][1]", "NaN"),
    (
        variant(old_logprobs=[[-1.0], [-2.0], [-0.3] * 3, [-1.5] * 2]),
        "old_logprobs[0]",
        "1 tokens, logprobs[0] has 2",
    ),
    (variant(group_ids=[0, 0, 2, 2]), "group_ids", "1 empty"),
    (variant(group_ids=[0, 0, -1, -1]), "group_ids[2]", "negative"),
    (variant(group_ids=[0, 0, 1]), "group_ids", "3 entries"),
    (variant(domains=["a", "b", "b", "b"]), "domains[1]", "domain of its group"),
    (variant(loss_mask=[[1, 2], [1], [1] * 3, [1] * 2]), "loss_mask[0][1]", "not 0 or 1"),
    (variant(sample_ids=[0, 1, 1, 2]), "sample_ids", "not unique"),
    (variant(reward=[1, 0, 1, 0]), "reward", "did you mean 'rewards'"),
    (variant(turns=[[[9, 1.0, "s"]], [], [], []]), "turns[0][0]", "token 9 of 2"),
    (variant(turns=[[[2, 1.0, "s"]], [], [], []]), "turns[0][0]", "last token, from 0 to 1"),
    (variant(turns=None, steps=[[], [[1, 1.0]], [], []]), "steps[1][0]", "last token, from 0 to 0"),
    (variant(rewards=[]), "rewards", "0 entries"),
    (variant(advantages=[1, None, 1, 0]), "advantages[1]", "not a number"),
    (variant(advantages=[1, math.nan, 1, 0]), "advantages[1]", "NaN"),
    (variant(advantages=[[1, math.nan], [1], [1] * 3, [1] * 2]), "advantages[0][1]", "NaN"),
    (variant(advantages=[[1, 1], 1, [1] * 3, [1] * 2]), "advantages[1]", "not a list"),
    ({"logprobs": [[-1.0]], "group_ids": [0]}, "rewards", "missing"),
    (variant(rewards=[10**400, 0, 0, 1]), "rewards[0]", "too large"),
    (variant(advantages=[math.inf, 1, 1, 0]), "advantages[0]", "infinite"),
    (
        variant(entropies=[[math.inf, 0.2], [0.3], [0.1] * 3, [0.4] * 2]),
        "entropies[0][0]",
        "infinite",
    ),
    (variant(token_ids=[[1.5, 2], [1], [2, 2, 3], [2, 3]]), "token_ids[0][0]", "whole number"),
    (variant(sample_ids=["a", "b", "c", "d"]), "sample_ids[0]", "whole number"),
    (variant(truncated=["yes", "no", "no", "no"]), "truncated[0]", "not 0 or 1"),
    (variant(components=[1, 0, 1, 0]), "components", "not an object"),
    (variant(component_weights=[1]), "component_weights", "not an object"),
    (variant(component_weights={"a": "x"}), "component_weights.a", "not a number"),
    (variant(component_weights={"a": math.nan}), "component_weights.a", "NaN"),
    (variant(component_weights={"b": 2}), "component_weights.b", "no component"),
    (variant(turns=[1, 2, 3, 4]), "turns[0]", "not a list"),
    (variant(turns=[[1], [], [], []]), "turns[0][0]", "not end, reward, state"),
    (variant(turns=[[[0, math.inf, "s"]], [], [], []]), "turns[0][0].reward", "infinite"),
    (variant(turns=[[[0, 1, "s"], [0, 2, "t"]], [], [], []]), "turns", "same policy token"),
    (variant(steps=[[], [], [], []]), "turns", "exclude"),
    (variant(turns=None, steps=[[[True, 1.0]], [], [], []]), "steps[0][0]", "not end, reward"),
]


@pytest.mark.parametrize(("case", "place", "said"), BAD_CASES, ids=lambda v: str(v)[:24])
def test_bad_cases_are_named(case, place, said):
    with pytest.raises(DataError) as caught:
        parse_case({k: v for k, v in case.items() if v is not None})
    assert place in str(caught.value) and said in str(caught.value)


GIVEN = {"logprobs": [[-1.0, -0.5], [-2.0]], "advantages": [1.0, -1.0]}
OF_TOKENS = {**GIVEN, "advantages": [[1.0, 0.5], [-1.0]]}
BESIDE_ADVANTAGES = [
    ("grpo", ["whiten=samples"], GIVEN, "whiten would do nothing"),
    ("grpo", ["shaping=eda"], GIVEN, "shaping would do nothing"),
    ("grpo", ["reward_shaping=per_token"], GIVEN, "reward_shaping would do nothing"),
    ("grpo", ["advantage_clip=0.5"], GIVEN, "advantage_clip would do nothing"),
    ("grpo", ["kl=reward_k1", "kl_beta=0.1"], GIVEN, "kl, kl_beta would do nothing"),
    ("grpo", ["preference_weight=1"], GIVEN, "preference_weight reads rewards"),
    ("grpo", ["positive_nll_weight=1"], GIVEN, "positive_nll_weight reads rewards"),
    ("gfpo", ["subset=token_efficiency"], GIVEN, 'subset = "token_efficiency" reads rewards'),
    ("gfpo", ["subset=adaptive"], GIVEN, 'subset = "adaptive" reads rewards'),
    ("gspo", [], OF_TOKENS, "one sequence_geo ratio cannot carry them"),
]


@pytest.mark.parametrize(("preset", "overrides", "case", "said"), BESIDE_ADVANTAGES)
def test_what_given_advantages_would_switch_off_is_refused(preset, overrides, case, said):
    with pytest.raises(DataError, match="advantages") as caught:
        evaluated(preset, overrides, **case)
    assert said in str(caught.value)


def test_rewards_beside_given_advantages_are_for_what_else_reads_them():
    plain = evaluated("grpo", **GIVEN)
    rewarded = {**GIVEN, "rewards": [0.2, 0.7]}
    found = evaluated("grpo", ["positive_nll_weight=1"], **rewarded)
    assert found["advantages"] == plain["advantages"]
    assert found["loss"] - plain["loss"] == pytest.approx(2.0)  # of the second sample
    with_correct = evaluated("grpo", ["positive_nll_weight=1"], **GIVEN, correct=[0, 1])
    assert with_correct["loss"] == found["loss"]
    rewarded["ref_logprobs"] = rewarded["logprobs"]
    preferred = evaluated("grpo", ["preference_weight=1"], **rewarded)
    assert preferred["loss"] - plain["loss"] == pytest.approx(math.log(2))
    # what a preset makes of rewards is replaced as a whole
    for preset in ("gdpo", "edge_grpo"):
        assert evaluated(preset, **GIVEN)["advantages"] == plain["advantages"]


def test_dropped_rewards_are_refused_beside_shaped_ones():
    case = {"logprobs": [[-1.0, -0.5], [-2.0]], "rewards": [1, 0], "dropped_rewards": {"all": [1]}}
    settings = ["advantage_std=batch_raw"]
    assert evaluated("lite_ppo", settings, **case)["loss"]
    with pytest.raises(DataError, match="dropped_rewards are not shaped"):
        evaluated("lite_ppo", [*settings, "reward_shaping=per_token"], **case)


def test_missing_columns_and_files_are_named(tmp_path):
    for preset, column in (("edge_grpo", "entropies"), ("deepseekmath", "ref_logprobs")):
        case = {k: v for k, v in BASE.items() if k not in ("entropies", "ref_logprobs")}
        with pytest.raises(DataError, match=column):
            evaluated(preset, **case)
    for preset, column in (
        ("gagpo", "turns"),
        ("gtpo_conflict", "token_ids"),
        ("mo_grpo", "components"),
    ):
        with pytest.raises(DataError, match=column):
            evaluated(preset, **{k: v for k, v in BASE.items() if k != column})
    with pytest.raises(DataError, match="no turns"):
        evaluated(
            "gagpo",
            **{k: v for k, v in BASE.items() if k != "turns"},
            steps=[[[0, 1.0]], [], [], []],
        )
    with pytest.raises(DataError, match="cannot read"):
        read_case(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match="as JSON"):
        read_case(tmp_path / "bad.json")


REFUSED = [
    ("grpo", ["kl=k1", "kl_beta=0.1"], "objective.kl", "zero"),
    ("grpo", ["kl_beta=0.1"], "objective.kl_beta", "no KL estimator"),
    ("gspo", ["aggregation=token_mean"], "objective.aggregation", "sequence_ratio_aggregation"),
    ("gspo", ["mismatch=tis", "proximal=rollout"], "objective.mismatch", "twice"),
    ("cispo", ["proximal=rollout", "mismatch=tis"], "objective.mismatch", "twice"),
    ("cispo", ["ratio=sequence_geo"], "objective.clip", "token ratios"),
    ("gmpo", ["ratio=token"], "objective.clip", "sequence_geo"),
    ("gspo", ["shaping=trace_recent"], "objective.ratio", "sequence_token"),
    ("gspo", ["kl=reward_k1", "domain.all.kl_beta=0.1"], "objective.ratio", "sequence_token"),
    ("deepseekmath_process", ["shaping=eda"], "objective.shaping", "sample-level"),
    ("rloo", ["advantage_std=group"], "objective.advantage_std", "deviation"),
    ("sapo", ["dual_clip=3.0"], "objective.dual_clip", "no dual clip"),
    ("grpo", ["mismatch=icepop", "mismatch_min=9.0"], "objective.mismatch_min", "above"),
    ("grpo", ["reference_ema=0.5"], "objective.reference_ema", "never refreshed"),
    ("grpo", ["cliplow=0.1"], "objective.cliplow", "clip_low"),
    ("grpo", ["clip_low=two"], "objective.clip_low", "number"),
    ("gsop", [], "objective.preset", "gspo"),
]


@pytest.mark.parametrize(("preset", "overrides", "key", "said"), REFUSED)
def test_wrong_combinations_are_refused(preset, overrides, key, said):
    with pytest.raises(ConfigError) as caught:
        load_objective(preset, overrides)
    assert key in str(caught.value) and said in str(caught.value)


def test_what_is_meant_can_be_said():
    config, _ = load_objective(
        "gspo", ["aggregation=token_mean", 'allow=["sequence_ratio_aggregation"]']
    )
    assert config.aggregation == "token_mean"


def test_the_command_prints_what_the_functions_compute(tmp_path, capsys):
    from grpo_megatron.cli.main import main

    path = tmp_path / "case.json"
    path.write_text(json.dumps({k: v for k, v in BASE.items() if k != "components"}))
    assert (
        main(["objective", "eval", "--objective", "dapo", "objective.clip_high=0.3", str(path)])
        == 0
    )
    case = {k: v for k, v in BASE.items() if k != "components"}
    assert json.loads(capsys.readouterr().out) == evaluated("dapo", ["clip_high=0.3"], **case)
    assert main(["objective", "list"]) == 0
    listed = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(PRESETS)
    assert main(["objective", "show", "gspo"]) == 0
    assert "sequence_geo" in capsys.readouterr().out
    for wrong in (
        ["objective", "show", "gsop"],
        ["objective", "eval", "--objective", "dapo"],
        ["objective", "eval", "--objective", "dapo", "clip_hihg=1.0", str(path)],
    ):
        assert main(wrong) == 2
        assert "error:" in capsys.readouterr().err.lower()
