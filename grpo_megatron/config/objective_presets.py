"""Named objectives: fixed combinations of choices, with the values of their papers.

Evidence: S strong (frontier use or several independent replications), M moderate, E emerging
(one paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ObjectivePreset:
    """One documented combination."""

    title: str
    source: str
    evidence: str
    use: str
    """When to choose it."""
    values: Mapping[str, Any]
    """Of `ObjectiveConfig`; everything else has its default."""
    group_size: int | None = None
    """The only group size for which it is defined."""
    with_data: Mapping[str, Any] = field(default_factory=dict)
    """Settings outside of `[objective]` that the paper combines it with (not applied)."""


_GROUP = {"advantage_std": "group"}
_TOKEN_MEAN = {"aggregation": "token_mean"}

PRESETS: dict[str, ObjectivePreset] = {
    "grpo": ObjectivePreset(
        "GRPO without KL", "arXiv:2402.03300", "S", "the baseline everything is compared with",
        _GROUP),
    "deepseekmath": ObjectivePreset(
        "GRPO as in DeepSeekMath, outcome rewards", "arXiv:2402.03300", "S",
        "a learned reward, where leaving the reference costs more than it gains",
        {**_GROUP, "kl": "k3", "kl_beta": 0.04},
        with_data={"batch.num_samples_per_prompt": 64, "optimizer.lr": 1e-6}),
    "deepseekmath_process": ObjectivePreset(
        "GRPO as in DeepSeekMath, process rewards", "arXiv:2402.03300", "M",
        "rewards for single steps of a solution exist",
        {"advantage": "process", "kl": "k3", "kl_beta": 0.04}),
    "r1_zero": ObjectivePreset(
        "DeepSeek-R1's RL: weak KL, practically no clipping", "arXiv:2501.12948", "S",
        "verifiable rewards on a base model; R1 splits one rollout into 16 updates",
        {**_GROUP, "clip_low": 1.0, "clip_high": 10.0, "kl": "k3", "kl_beta": 0.001,
         "reference_interval": 400},
        with_data={"batch.num_samples_per_prompt": 16, "optimizer.lr": 3e-6}),
    "dr_grpo": ObjectivePreset(
        "Dr. GRPO: no deviation, constant length", "arXiv:2503.20783", "S",
        "long wrong answers grow: both length and difficulty bias are removed",
        {"aggregation": "constant"}),
    "dapo": ObjectivePreset(
        "DAPO: clip-higher and token mean", "arXiv:2503.14476", "S",
        "long chains of thought on dense models; combine with dynamic sampling",
        {**_GROUP, **_TOKEN_MEAN, "clip_high": 0.28},
        with_data={"sampling.dynamic": "true", "batch.num_samples_per_prompt": 16,
                   "optimizer.lr": 1e-6, "domains.rewards": "soft_overlong"}),
    "gspo": ObjectivePreset(
        "GSPO: length-normalised sequence ratio", "arXiv:2507.18071", "S",
        "Mixture-of-Experts policies: jumps of single-token ratios average out",
        {**_GROUP, "ratio": "sequence_geo", "clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": ObjectivePreset(
        "GSPO-token: sequence ratio with token gradients", "arXiv:2507.18071", "S",
        "as gspo, where advantages differ from token to token",
        {**_GROUP, "ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4}),
    "rloo": ObjectivePreset(
        "Leave-one-out baseline", "arXiv:2402.14740", "S",
        "an unbiased baseline without a deviation", {"advantage": "rloo", **_TOKEN_MEAN}),
    "reinforce_pp": ObjectivePreset(
        "REINFORCE++: no groups, batch whitening", "arXiv:2501.03262", "M",
        "one sample per prompt",
        {"advantage": "reward", "whiten": "tokens", "std_kind": "population",
         "kl": "reward_k1", "kl_beta": 0.01, **_TOKEN_MEAN}),
    "reinforce_pp_baseline": ObjectivePreset(
        "REINFORCE++ with the group mean as baseline", "arXiv:2501.03262", "M",
        "groups of unlike difficulty, one scale for all",
        {"whiten": "tokens", "std_kind": "population", "kl": "k2", "kl_beta": 0.001,
         **_TOKEN_MEAN}),
    "lite_ppo": ObjectivePreset(
        "Lite PPO: group mean, batch deviation, token mean", "arXiv:2508.08221", "M",
        "a small, robust recipe for base models",
        {"advantage_std": "batch_raw", **_TOKEN_MEAN}),
    "gfpo": ObjectivePreset(
        "GFPO: train on the most token-efficient samples", "arXiv:2508.09726", "M",
        "answers get longer without getting better; sample more than you train",
        {**_GROUP, **_TOKEN_MEAN, "subset": "token_efficiency", "subset_size": 8},
        with_data={"batch.num_samples_per_prompt": 24}),
    "lambda_grpo": ObjectivePreset(
        "λ-GRPO: learnable length preference", "arXiv:2510.06870", "E",
        "unsure between sequence and token mean",
        {**_GROUP, "clip_high": 0.28, "aggregation": "lambda_grpo"}),
    "edge_grpo": ObjectivePreset(
        "EDGE-GRPO: entropy-driven advantage", "arXiv:2507.21848", "E",
        "advantages of a group collapse to few values", {**_GROUP, "shaping": "eda"}),
    "mo_grpo": ObjectivePreset(
        "MO-GRPO: every reward component standardised", "arXiv:2509.22047", "E",
        "components of unlike variance, where one would dominate the sum",
        {"advantage": "components", **_GROUP}),
    "gdpo": ObjectivePreset(
        "GDPO: standardised components, then batch whitening", "arXiv:2601.05242", "M",
        "components of unlike scale",
        {"advantage": "components", **_GROUP, "whiten": "samples"}),
    "tic_grpo": ObjectivePreset(
        "TIC-GRPO: one trajectory ratio, clipped above only", "arXiv:2508.02833", "E",
        "short completions; the product of ratios explodes on long ones",
        {**_GROUP, "ratio": "sequence_product", "clip": "upper"}),
    "gagpo": ObjectivePreset(
        "GAGPO: turn-level advantages from shared states", "arXiv:2605.13217", "E",
        "agents whose rollouts pass through identical environment states",
        {"advantage": "gagpo", "ratio": "turn_geo"}),
    "gtpo_entropy": ObjectivePreset(
        "GTPO: entropy-weighted token rewards", "arXiv:2508.04349", "E",
        "credit to uncertain tokens of right answers",
        {"advantage": "gtpo_entropy", "std_kind": "population", **_TOKEN_MEAN}),
    "grpo_s": ObjectivePreset(
        "GRPO-S: entropy-weighted sequence rewards", "arXiv:2508.04349", "E",
        "as gtpo_entropy, at sequence level",
        {"advantage": "grpo_s", "std_kind": "population", "ratio": "sequence_mean"}),
    "gtpo_conflict": ObjectivePreset(
        "GTPO: conflict tokens are protected", "arXiv:2508.03772", "E",
        "right and wrong answers share long openings or endings (templates)",
        {**_GROUP, "shaping": "gtpo_conflict", **_TOKEN_MEAN}),
    "grpo_lambda_length": ObjectivePreset(
        "GRPO-λ: length penalty only where the policy succeeds", "arXiv:2505.18086", "E",
        "shorter answers without losing hard prompts",
        {**_GROUP, "reward_shaping": "length_switch"}),
    "grpo_lambda_trace": ObjectivePreset(
        "GRPO-λ: traces over tokens", "arXiv:2510.00194", "E",
        "the end of an answer decides", {**_GROUP, "shaping": "trace_recent"}),
    "xrpo": ObjectivePreset(
        "XRPO: bonus for unlikely correct answers", "arXiv:2510.06672", "E",
        "exploration on hard prompts", {**_GROUP, "shaping": "xrpo"}),
    "two_grpo": ObjectivePreset(
        "2-GRPO: groups of two", "arXiv:2510.00977", "E",
        "many prompts at few rollouts; keep the number of rollouts a batch",
        {**_GROUP, "std_kind": "population"}, group_size=2),
    "cispo": ObjectivePreset(
        "CISPO: clipped importance weights, no dropped tokens", "arXiv:2506.13585", "S",
        "rare but decisive tokens must keep their gradient",
        {**_GROUP, "clip": "cispo", **_TOKEN_MEAN}),
    "gmpo": ObjectivePreset(
        "GMPO: geometric mean of clipped ratios", "arXiv:2507.20673", "M",
        "token clipping with sequence-level stability",
        {**_GROUP, "clip": "gmpo", "ratio": "sequence_geo", "clip_low": 0.4, "clip_high": 0.4}),
    "sapo": ObjectivePreset(
        "SAPO: a soft gate instead of a clip", "arXiv:2511.20347", "M",
        "clipping discards too much signal", {**_GROUP, "clip": "sapo"}),
    "deepseek_v3_2": ObjectivePreset(
        "DeepSeek-V3.2: unbiased KL and off-policy sequence masking", "arXiv:2512.02556", "S",
        "large MoE with several updates per rollout; set kl_beta per domain",
        {"kl": "is_k3", "off_policy_mask": "opsm"}),
    "dense_default": ObjectivePreset(
        "Our choice for dense models", "docs/objectives.md", "S",
        "start here with a dense policy",
        {**_TOKEN_MEAN, "clip_high": 0.28, "dual_clip": 3.0, "mismatch": "tis",
         "off_policy_mask": "opsm", "kl": "is_k3"}),
    "moe_default": ObjectivePreset(
        "Our choice for Mixture-of-Experts models", "docs/objectives.md", "S",
        "start here with an MoE policy",
        {"ratio": "sequence_geo", "clip_low": 3e-4, "clip_high": 4e-4, "mismatch": "icepop",
         "mismatch_min": 0.5, "mismatch_max": 5.0, "off_policy_mask": "opsm", "kl": "is_k3"}),
}
