"""Combinations of objective choices that are wrong (`rules.toml` holds reason and remedy)."""

from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.objective_presets import PRESETS
from grpo_megatron.config.rules import Conditions
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest

TOKEN_LEVEL = ("process", "gtpo_entropy", "gagpo")
"""Estimators whose advantages differ from token to token."""
TOKEN_SHAPINGS = ("gtpo_conflict", "trace_recent", "trace_both")
_SEQUENCE_RATIOS = ("sequence_geo", "sequence_product", "sequence_mean")


def token_level(o: ObjectiveConfig) -> bool:
    """Whether advantages differ within a sample."""
    return (o.advantage in TOKEN_LEVEL or o.shaping in TOKEN_SHAPINGS
            or o.kl == "reward_k1")


WITHIN_OBJECTIVE: Conditions = {
    "objective.preset": lambda o: o.preset not in PRESETS and {
        "nearest": nearest(o.preset, PRESETS)},
    "objective.k1": lambda o: o.kl == "k1",
    "objective.kl_beta": lambda o: o.kl == "none" and o.kl_beta > 0,
    "objective.reference_ema": lambda o: o.reference_ema and not o.reference_interval,
    "objective.sequence_aggregation": lambda o: (
        o.ratio in _SEQUENCE_RATIOS and o.aggregation != "seq_mean_token_mean"
        and "sequence_ratio_aggregation" not in o.allow),
    "objective.shaping": lambda o: o.shaping != "none" and (
        o.advantage in TOKEN_LEVEL or o.kl == "reward_k1"),
    "objective.sequence_ratio": lambda o: o.ratio in _SEQUENCE_RATIOS and token_level(o),
    "objective.token_clip": lambda o: o.clip in ("cispo", "sapo") and o.ratio != "token",
    "objective.gmpo": lambda o: o.clip == "gmpo" and o.ratio != "sequence_geo",
    "objective.dual_clip": lambda o: o.dual_clip and o.clip != "ppo",
    "objective.ratio_min": lambda o: o.clip == "cispo" and o.ratio_min > o.ratio_max,
    "objective.mismatch": lambda o: o.proximal == "rollout" and o.mismatch != "none",
    "objective.mismatch_min": lambda o: (
        o.mismatch in ("icepop", "geometric_mask") and o.mismatch_min > o.mismatch_max),
    "objective.advantage_std": lambda o: (
        o.advantage_std != "none" and o.advantage not in ("group", "components")),
    "objective.components": lambda o: (
        o.advantage == "components" and o.advantage_std != "group"),
    "objective.turn_ratio": lambda o: o.ratio == "turn_geo" and o.advantage != "gagpo",
    "objective.shuffle_advantages": lambda o: o.shuffle_advantages and token_level(o),
}


def _preset_size(c: RunConfig) -> dict[str, int] | None:
    preset = PRESETS.get(c.objective.preset)
    size = preset.group_size if preset else None
    return {"size": size} if size not in (None, c.batch.num_samples_per_prompt) else None


OBJECTIVE_AND_BATCH: Conditions = {
    "objective.group_size": _preset_size,
    "objective.gagpo": lambda c: c.objective.advantage == "gagpo",
    "group_size": lambda c: c.batch.num_samples_per_prompt == 1 and (
        c.objective.advantage not in ("reward", "gagpo", "process")),
    "objective.subset_size": lambda c: c.objective.subset != "none" and (
        c.objective.subset_size > c.batch.num_samples_per_prompt),
    "objective.passk_k": lambda c: c.objective.advantage in ("passk", "pkpo") and (
        c.objective.passk_k > c.batch.num_samples_per_prompt),
    "objective.llds_weight": lambda c: c.objective.llds_weight > 0 and (
        c.batch.updates_per_rollout == 1 and not c.batch.max_staleness),
}
"""Rules of RL steps; they do not hold for a case that is only evaluated."""
