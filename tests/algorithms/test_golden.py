"""Every section of the golden file, in float64 to 1e-9, by the functions the trainer calls."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_megatron.algorithms.advantages.after import conflict_weights
from grpo_megatron.algorithms.advantages.estimators import shaped_rewards
from grpo_megatron.algorithms.aggregation import Lengths, lambda_grpo, token_weights
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.config.objective import ObjectiveConfig
from tests.algorithms.evaluation import advantages, evaluated, same
from tests.algorithms.golden import GOLDEN

NO_KL = ("kl=none", "kl_beta=0")
EXACT = ("advantage_eps=0", "std_kind=population")
PLAIN = "advantage_std=none"
OUT = GOLDEN["advantages"]["out"]


@pytest.mark.parametrize(
    ("key", "preset", "overrides"),
    [
        ("grpo_unbiased_eps1e-6 (verl,ROLL,slime)", "grpo", ()),
        ("grpo_unbiased_eps1e-4 (TRL)", "grpo", ("advantage_eps=1e-4",)),
        ("grpo_unbiased_eps1e-9 (OpenRLHF group_norm)", "grpo", ("advantage_eps=1e-9",)),
        (
            "grpo_biased_eps1e-4 (Megatron-LM)",
            "grpo",
            ("advantage_eps=1e-4", "std_kind=population"),
        ),
        ("grpo_biased_eps1e-6", "grpo", ("std_kind=population",)),
        ("mean_only (Dr.GRPO, DeepSeek-V3.2, tinker, prime-rl)", "dr_grpo", ()),
        ("mean_only (Dr.GRPO, DeepSeek-V3.2, tinker, prime-rl)", "deepseek_v3_2", ()),
        ("rloo", "rloo", ()),
        ("maxrl (r-mean)/(mean+1e-6)", "grpo", ("advantage=maxrl", PLAIN)),
        (
            "lite_ppo_raw_batch_std_unbiased_eps1e-4 (TRL scale_rewards=batch)",
            "lite_ppo",
            ("advantage_eps=1e-4",),
        ),
        (
            "lite_ppo_residual_batch_std_unbiased_eps1e-6 (ROLL group_reward_norm)",
            "lite_ppo",
            ("advantage_std=batch_residual",),
        ),
        (
            "reinforce++_baseline_token_weighted_biased_var (OpenRLHF: clamp var 1e-8)",
            "reinforce_pp_baseline",
            (*EXACT, *NO_KL),
        ),
        ("reinforce++_gamma1_no_kl_token_weighted_biased", "reinforce_pp", (*EXACT, *NO_KL)),
        ("passk_analytic_k2 (Chen et al.)", "grpo", ("advantage=passk", PLAIN)),
        (
            "pkpo_effective_reward_k2 (Walder & Karkhanis)",
            "grpo",
            ("advantage=pkpo", PLAIN, "pkpo_baseline=false"),
        ),
        ("passk_best_minus_second (verl, no std)", "grpo", ("advantage=best_minus_second", PLAIN)),
    ],
)
def test_advantages(key, preset, overrides):
    section = GOLDEN["advantages"]
    same(advantages(preset, section["rewards"], section["lengths"], *overrides), OUT[key])


def test_deliberate_differences():
    """verl adds its eps to the variance, NeMo-RL scales by a leave-one-out deviation."""
    section = GOLDEN["advantages"]
    ours = advantages(
        "reinforce_pp_baseline",
        section["rewards"],
        section["lengths"],
        "advantage_eps=0",
        *NO_KL,
        "std_kind=sample",
    )
    verl = OUT["reinforce++_baseline_token_weighted_unbiased_var (verl masked_whiten eps1e-8)"]
    same(ours, verl, 1e-6)
    nemo = OUT["nemo_rl (leave_one_out=True, std from the same subset)"]
    rloo = advantages("rloo", section["rewards"], section["lengths"])
    assert rloo[0][0] == nemo[0][0] == 1.0
    assert nemo[0][1] == pytest.approx(-0.577, abs=1e-3) and rloo[0][1] == pytest.approx(-1 / 3)


def test_a_group_of_one_is_zero():
    section = GOLDEN["advantages_edge_G1"]
    for preset in ("grpo", "dr_grpo", "rloo", "gspo", "gdpo", "lite_ppo"):
        more = {"components": {"a": [0.7]}} if preset == "gdpo" else {}
        same(advantages(preset, section["rewards"], [[2]], **more), section["recommended"])


def test_two_grpo():
    section = GOLDEN["two_grpo"]
    rewards, lengths = section["rewards"], [[1, 1]]
    same(advantages("two_grpo", rewards, lengths, "advantage_eps=0"), section["biased_std_eps0"])
    same(advantages("grpo", rewards, lengths, "advantage_eps=0"), section["unbiased_std_eps0"])
    same(advantages("rloo", rewards, lengths), section["rloo"])
    same(advantages("dr_grpo", rewards, lengths), section["mean_only"])


@pytest.mark.parametrize(("kind", "key"), [("population", "biased"), ("sample", "unbiased")])
def test_process_supervision(kind, key):
    section = GOLDEN["process_supervision"]
    found = evaluated(
        "deepseekmath_process",
        [*NO_KL, "advantage_eps=0", f"std_kind={kind}"],
        rewards=[0, 0],
        group_ids=[0, 0],
        steps=section["steps(end_token,reward)"],
        logprobs=[[-1.0] * n for n in section["lengths"]],
    )
    same(found["advantages"], section["adv"][key])


@pytest.mark.parametrize(
    ("preset", "key"),
    [
        ("grpo", "grpo_sum_then_norm_biased"),
        ("mo_grpo", "mo_grpo_biased"),
        ("gdpo", "gdpo_biased_then_batch_whiten_biased"),
    ],
)
def test_multi_reward(preset, key):
    section = GOLDEN["multi_reward"]
    found = evaluated(
        preset,
        EXACT,
        group_ids=[0] * 4,
        logprobs=[[-1.0]] * 4,
        components={"accuracy": section["accuracy"], "format": section["format"]},
    )
    same(found["advantages"], section[key])


@pytest.mark.parametrize("metric", ["shortest", "token_efficiency"])
def test_gfpo(metric):
    section = GOLDEN["gfpo"]
    found = evaluated(
        "gfpo",
        [*EXACT, f"subset={metric}", f"subset_size={section['k']}"],
        rewards=section["rewards"],
        group_ids=[0] * 8,
        logprobs=[[-1.0] * int(n) for n in section["lengths"]],
    )
    same(found["advantages"], section[metric]["adv"])
    kept = [i for i, row in enumerate(found["grad_logprobs"]) if any(row)]
    assert set(kept) <= set(section[metric]["kept"])
    assert found["metrics"]["batch/not_trained"] == 8 - section["k"]


LOSSES = GOLDEN["losses_2x3"]
SAME_CLIP = ("clip_low=0.2", "clip_high=0.2")


@pytest.mark.parametrize(
    ("key", "preset", "overrides"),
    [
        ("grpo_eps0.2/seq-mean-token-mean", "grpo", ()),
        ("grpo_eps0.2/token-mean", "grpo", ("aggregation=token_mean",)),
        ("grpo_eps0.2/dr_grpo_const", "dr_grpo", ("aggregation_length=4",)),
        ("grpo_eps0.2/seq-mean-token-sum", "grpo", ("aggregation=seq_mean_token_sum",)),
        ("dapo_0.2_0.28/token-mean", "dapo", ()),
        ("dualclip_c=None/token-mean (logp[1,1]=old+ln5)", "grpo", ("aggregation=token_mean",)),
        (
            "dualclip_c=3.0/token-mean (logp[1,1]=old+ln5)",
            "grpo",
            ("aggregation=token_mean", "dual_clip=3.0"),
        ),
        ("gspo_0.2_0.2", "gspo", SAME_CLIP),
        ("gspo_0.2_0.2", "gspo_token", SAME_CLIP),
        ("gspo_0.0003_0.0004", "gspo", ()),
        ("sequence_product_eps0.2", "tic_grpo", ("clip=ppo",)),
        ("cispo_upper_only_1.28/token-mean", "cispo", ("ratio_max=1.28",)),
        ("cispo_both_0.8_1.28/token-mean", "cispo", ("ratio_max=1.28", "ratio_min=0.8")),
        ("sapo_1.0_1.05", "sapo", ()),
        ("gmpo_log0.4", "gmpo", ()),
        ("gmpo_log0.2", "gmpo", ("clip_low=0.2", "clip_high=0.2")),
    ],
)
def test_losses_and_gradients(key, preset, overrides):
    inputs, expected = LOSSES["inputs"], LOSSES[key]
    logprobs = [list(row) for row in inputs["logp"]]
    if key.startswith("dualclip"):
        logprobs[1][1] = inputs["logp_old"][1][1] + math.log(5)
    found = evaluated(
        preset,
        overrides,
        advantages=inputs["adv"],
        group_ids=[0, 0],
        logprobs=logprobs,
        old_logprobs=inputs["logp_old"],
        loss_mask=inputs["mask"],
    )
    same(found["loss"], expected["loss"])
    same(found["grad_logprobs"], expected["grad"])


def test_rows_without_policy_tokens_count_as_samples():
    inputs, section = LOSSES["inputs"], GOLDEN["all_masked_row"]
    found = evaluated(
        "grpo",
        advantages=inputs["adv"],
        group_ids=[0, 0],
        logprobs=inputs["logp"],
        old_logprobs=inputs["logp_old"],
        loss_mask=section["mask"],
    )
    same(found["loss"], section["count_all_rows (TRL grpo)"])
    same(2 * found["loss"], section["count_valid_rows (verl without global_batch_size)"])


@pytest.mark.parametrize(
    ("name", "key"),
    [("token_mean", "exact_token_mean"), ("seq_mean_token_mean", "seq_mean_token_mean")],
)
def test_aggregation_of_uneven_samples(name, key):
    section = GOLDEN["aggregation"]
    counts = np.array(section["tokens"], np.int64)
    config = ObjectiveConfig(preset="grpo", aggregation=name)
    zeros = np.zeros(len(counts), np.int64)
    weights, _ = token_weights(config, Lengths(counts, zeros, 1), zeros)
    same(float((weights * counts * np.array(section["per_token_loss"])).sum()), section[key])


@pytest.mark.parametrize(
    ("name", "gradient"), [("k2", "k2"), ("k3", "k3"), ("is_k3", "is_k3 (r*k3, grad through r)")]
)
def test_kl(name, gradient):
    section = GOLDEN["kl_tokens"]
    found = evaluated(
        "grpo",
        ["aggregation=token_mean", f"kl={name}", "kl_beta=1.0"],
        advantages=[0],
        group_ids=[0],
        logprobs=[section["logp"]],
        old_logprobs=[section["logp_old"]],
        ref_logprobs=[section["logp_ref"]],
    )
    same(found["loss"] * 3, sum(section[name]))
    same([g * 3 for g in found["grad_logprobs"][0]], section["dlogp_grad"][gradient])
    same(found["metrics"]["reference/k1"] * 3, sum(section["k1"]))
    same(found["metrics"]["reference/k3"] * 3, sum(section["k3"]))


def test_expected_gradients_of_kl_estimators():
    """Over the policy's own samples, k2 and is_k3 give the gradient of KL(policy || reference),
    k3 that of KL(reference || policy), and k1 in the reward the former again."""
    section = GOLDEN["kl_gradients"]
    pi, ref = np.array(section["pi"]), np.array(section["ref"])

    def expected(token_gradients: list[float]) -> np.ndarray:
        score = np.eye(3) - pi  # d log pi_a / d logits
        return (pi[:, None] * np.array(token_gradients)[:, None] * score).sum(0)

    for name, key in (
        ("k2", "k2_as_loss"),
        ("k3", "k3_as_loss"),
        ("is_k3", "is_k3_on_policy (sg-ratio grad kept)"),
    ):
        found = evaluated(
            "grpo",
            ["aggregation=token_mean", f"kl={name}", "kl_beta=1.0"],
            advantages=[0],
            group_ids=[0],
            logprobs=[np.log(pi).tolist()],
            ref_logprobs=[np.log(ref).tolist()],
        )
        same(
            expected([g * 3 for g in found["grad_logprobs"][0]]).tolist(),
            section["expected_grad"][key],
        )
    in_reward = []
    for a in range(3):  # one sample of one token each: only its own credit
        found = evaluated(
            "grpo",
            ["kl=reward_k1", "kl_beta=1.0"],
            rewards=[0],
            group_ids=[0],
            logprobs=[[math.log(pi[a])]],
            ref_logprobs=[[math.log(ref[a])]],
        )
        in_reward.append(found["grad_logprobs"][0][0])
    same(expected(in_reward).tolist(), section["expected_grad"]["k1_in_reward (sg(k1)*score)"])


OFF = GOLDEN["off_policy"]
OFF_CASE = {
    "advantages": OFF["adv"],
    "group_ids": [0, 0],
    "logprobs": OFF["logp"],
    "old_logprobs": OFF["logp_prox(old)"],
    "rollout_logprobs": OFF["logp_rollout"],
    "loss_mask": OFF["mask"],
}


def test_decoupled_ppo():
    expected = OFF["decoupled_ppo_eps0.2_tis1.2_token_mean"]
    found = evaluated(
        "grpo", ["aggregation=token_mean", "mismatch=tis", "mismatch_max=1.2"], **OFF_CASE
    )
    same(found["loss"], expected["loss"])
    same(found["grad_logprobs"], expected["grad"])
    same(found["metrics"]["mismatch/k1"], OFF["mismatch_k1 E[logmu-logpi_old]"])
    same(found["metrics"]["mismatch/k3"], OFF["mismatch_k3"])
    same(found["metrics"]["mismatch/rho/ess_fraction"], OFF["ess_token_fraction"])


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("tis_C=1.2", ("tis", "mismatch_max=1.2")),
        ("tis_C=2", ("tis", "mismatch_max=2.0")),
        ("icepop_0.5_5", ("icepop", "mismatch_min=0.5", "mismatch_max=5.0")),
        ("icepop_0.9_1.2", ("icepop", "mismatch_min=0.9", "mismatch_max=1.2")),
        ("seq_tis_C=1.2", ("tis_sequence", "mismatch_max=1.2")),
        ("mis_seq_C=1.2", ("mis_sequence", "mismatch_max=1.2")),
        ("seq_geomean", ("geometric_mask", "mismatch_min=0.9", "mismatch_max=1.0")),
    ],
)
def test_mismatch_weights(key, settings):
    """The weight is the ratio of the gradients with and without it."""
    base = ["aggregation=token_mean", "clip=none"]
    plain = evaluated("grpo", base, **OFF_CASE)["grad_logprobs"]
    weighted = evaluated("grpo", [*base, f"mismatch={settings[0]}", *settings[1:]], **OFF_CASE)[
        "grad_logprobs"
    ]
    for i in range(2):
        for t in range(3 if i == 0 else 2):
            weight = OFF[key][i] if np.ndim(OFF[key]) == 1 else OFF[key][i][t]
            if key == "seq_geomean":  # outside [0.9, 1.0]: masked; inside: raw token ratios
                weight = OFF["token_ratio"][i][t] if 0.9 <= weight <= 1.0 else 0.0
            same(weighted[i][t], weight * plain[i][t])


@pytest.mark.parametrize(
    ("delta", "key"), [(0.1, "opsm_keep_delta0.1_rollout"), (0.5, "opsm_keep_delta0.5_rollout")]
)
def test_off_policy_sequence_mask(delta, key):
    found = evaluated(
        "grpo", ["off_policy_mask=opsm", f"opsm_delta={delta}", "clip=none"], **OFF_CASE
    )
    assert [any(row) for row in found["grad_logprobs"]] == [bool(k) for k in OFF[key]]
    assert found["metrics"]["rejected/opsm_sample_fraction"] == 1 - np.mean(OFF[key])


def test_edge_entropy_advantage():
    section = GOLDEN["edge_eda"]
    found = evaluated(
        "edge_grpo",
        ["advantage_eps=0"],
        rewards=[1, 0, 0, 0],
        group_ids=[0] * 4,
        logprobs=[[-1.0]] * 4,
        entropies=[[h] for h in section["mean_entropy"]],
    )
    same(found["advantages"], section["out"])


def test_gtpo_entropy():
    section = GOLDEN["gtpo_entropy"]
    alpha = [f"gtpo_alpha{n + 1}={value}" for n, value in enumerate(section["alpha"])]
    case = {
        "rewards": [1, 1, 0],
        "group_ids": [0] * 3,
        "logprobs": [[-1.0] * 2, [-1.0], [-1.0] * 2],
        "entropies": section["H_correct"] + section["H_wrong"],
    }
    found = evaluated("gtpo_entropy", ["advantage_eps=0", *alpha], **case)
    same(found["advantages"], [*section["adv_pos_biased"], [0, 0]])


@pytest.mark.parametrize("name", ["gtpo_entropy", "gtpo_entropy_paper_values"])
def test_gtpo_shaped_rewards(name):
    section = GOLDEN[name]
    right, wrong = section["H_correct"], section["H_wrong"]
    case = parse_case(
        {
            "rewards": [1] * len(right) + [0] * len(wrong),
            "entropies": right + wrong,
            "group_ids": [0] * (len(right) + len(wrong)),
            "logprobs": [[-1.0] * len(row) for row in right + wrong],
        }
    )
    config = ObjectiveConfig(
        preset="gtpo_entropy", gtpo_alpha1=section["alpha"][0], gtpo_alpha2=section["alpha"][1]
    )
    same(
        shaped_rewards(config, case.batch)[0].tolist(),
        section["shaped_pos"] + section["shaped_neg"],
    )


def test_gtpo_conflict_weights():
    section = GOLDEN["gtpo_conflict"]
    case = parse_case(
        {
            "rewards": [0] * 3,
            "group_ids": [0] * 3,
            "logprobs": [[-1.0] * 4] * 3,
            "token_ids": section["ids"],
        }
    )
    sign = case.batch.rewards.new_tensor(section["sign"])
    config = ObjectiveConfig(preset="gtpo_conflict")
    same(
        conflict_weights(config, case.batch, sign).tolist(),
        section["delta(prefix-run x suffix-run, w=2)"],
    )


def test_xrpo_sharpening():
    section = GOLDEN["xrpo_sharpen"]
    found = evaluated(
        "xrpo",
        [*EXACT, f"xrpo_lambda={section['lambda']}", f"xrpo_kappa={section['kappa']}"],
        rewards=[1, 1, 0, 0],
        group_ids=[0] * 4,
        logprobs=[[score] for score in section["score"]],
    )
    same(found["advantages"], section["out"])


@pytest.mark.parametrize("exponent", GOLDEN["lambda_grpo"]["weights"])
def test_lambda_grpo_weights_and_their_slope(exponent):
    section = GOLDEN["lambda_grpo"]
    counts = np.array(section["lengths"], np.int64)
    config = ObjectiveConfig(preset="lambda_grpo")

    def at(value: float) -> tuple[np.ndarray, np.ndarray]:
        return lambda_grpo(config, Lengths(counts, np.zeros(3, np.int64), 1, value))

    weights, slope = at(float(exponent))
    same((weights * counts.sum()).tolist(), section["weights"][exponent])
    above, below = at(float(exponent) + 1e-6)[0], at(float(exponent) - 1e-6)[0]
    same(slope.tolist(), ((above - below) / 2e-6).tolist(), 1e-8)


@pytest.mark.parametrize("advantage", [-1, 1])
def test_llds(advantage):
    section = GOLDEN["llds"]
    case = {**OFF_CASE, "advantages": [1, advantage]}
    base = ["aggregation=token_mean"]
    plain = evaluated("grpo", base, **case)
    found = evaluated("grpo", [*base, f"llds_weight={section['lambda']}"], **case)
    key = f"A=[1,{advantage}]"
    same(found["loss"] - plain["loss"], section[key])
    if advantage > 0:
        same(
            np.subtract(found["grad_logprobs"], plain["grad_logprobs"]).tolist(),
            section["grad_A=[1,1]"],
        )
