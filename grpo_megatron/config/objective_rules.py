"""Combinations of objective choices that are wrong, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.objective_presets import PRESETS
from grpo_megatron.config.problems import Violation
from grpo_megatron.config.suggest import nearest

TOKEN_LEVEL = ("process", "gtpo_entropy", "gagpo")
"""Estimators whose advantages differ from token to token."""
TOKEN_SHAPINGS = ("gtpo_conflict", "trace_recent", "trace_both")
_SEQUENCE_RATIOS = ("sequence_geo", "sequence_product", "sequence_mean")


def token_level(objective: ObjectiveConfig) -> bool:
    """Whether advantages differ within a sample."""
    return (objective.advantage in TOKEN_LEVEL or objective.shaping in TOKEN_SHAPINGS
            or objective.kl == "reward_k1")


def objective_violations(o: ObjectiveConfig, prefix: str = "objective") -> Iterator[Violation]:
    """Rules within `[objective]`."""
    def bad(field: str, reason: str, remedy: str, *related: str) -> Violation:
        return Violation("objective", f"{prefix}.{field}", getattr(o, field), reason,
                         remedy=remedy, related=tuple(f"{prefix}.{name}" for name in related))

    if o.preset not in PRESETS:
        near = tuple(nearest(o.preset, list(PRESETS)))
        yield Violation("objective", f"{prefix}.preset", o.preset,
                        f"no objective preset is called {o.preset!r}", nearest=near,
                        remedy="" if near else "see grpo-megatron objective list")
    if o.kl == "k1":
        yield bad("kl", "k1 as a loss has an expected gradient of zero: it regularises nothing",
                  "use is_k3 or k2 in the loss, or reward_k1")
    if o.kl == "none" and o.kl_beta > 0:
        yield bad("kl_beta", "there is no KL estimator to weigh", "set kl, for example is_k3", "kl")
    if o.reference_ema is not None and not o.reference_interval:
        yield bad("reference_ema", "the reference is never refreshed",
                  "set reference_interval", "reference_interval")
    if (o.ratio in _SEQUENCE_RATIOS and o.aggregation not in ("seq_mean_token_mean",)
            and "sequence_ratio_aggregation" not in o.allow):
        yield bad("aggregation", f"a {o.ratio} ratio gives one term per sequence; "
                  f"{o.aggregation} weighs sequences by length or group",
                  "use seq_mean_token_mean, or say allow = [\"sequence_ratio_aggregation\"]",
                  "ratio")
    if o.shaping != "none" and (o.advantage in TOKEN_LEVEL or o.kl == "reward_k1"):
        yield bad("shaping", f"{o.shaping} reweights sample-level advantages", "set it to none",
                  "advantage", "kl")
    if o.ratio in _SEQUENCE_RATIOS and token_level(o):
        yield bad("ratio", "advantages differ from token to token, one sequence ratio cannot "
                  "carry them", "use sequence_token or token", "advantage", "shaping", "kl")
    if o.clip in ("cispo", "sapo") and o.ratio != "token":
        yield bad("clip", f"{o.clip} is defined on token ratios", 'set ratio = "token"', "ratio")
    if o.clip == "gmpo" and o.ratio != "sequence_geo":
        yield bad("clip", "gmpo clips tokens before their geometric mean",
                  'set ratio = "sequence_geo"', "ratio")
    if o.dual_clip is not None and o.clip != "ppo":
        yield bad("dual_clip", f"{o.clip} has no dual clip", 'set clip = "ppo"', "clip")
    if o.clip == "cispo" and o.ratio_min > o.ratio_max:
        yield bad("ratio_min", f"is above ratio_max {o.ratio_max:g}", "swap them", "ratio_max")
    if o.proximal == "rollout" and o.mismatch != "none":
        yield bad("mismatch", "the ratio to the engine's log-probs already corrects the mismatch: "
                  "it would be corrected twice", 'set mismatch = "none" or proximal = "recompute"',
                  "proximal")
    if o.mismatch in ("icepop", "geometric_mask") and o.mismatch_min > o.mismatch_max:
        yield bad("mismatch_min", f"is above mismatch_max {o.mismatch_max:g}", "swap them",
                  "mismatch_max")
    if o.advantage_std != "none" and o.advantage not in ("group", "components"):
        yield bad("advantage_std", f"advantage {o.advantage} is not divided by a deviation",
                  'set advantage_std = "none"', "advantage")
    if o.advantage == "components" and o.advantage_std != "group":
        yield bad("advantage_std", "components are standardised in their group",
                  'set advantage_std = "group"', "advantage")
    if o.ratio == "turn_geo" and o.advantage != "gagpo":
        yield bad("ratio", "turn ratios need turns (gagpo)", 'set ratio = "sequence_geo"',
                  "advantage")
    if o.shuffle_advantages and token_level(o):
        yield bad("shuffle_advantages", "advantages differ within a sample, they cannot be "
                  "permuted over samples", "use the control with sample-level advantages")


def batch_violations(o: ObjectiveConfig, group_size: int, updates: int,
                     staleness: int) -> Iterator[Violation]:
    """Rules between `[objective]` and `[batch]`."""
    preset = PRESETS.get(o.preset)
    size_key = "batch.num_samples_per_prompt"
    if preset and preset.group_size not in (None, group_size):
        yield Violation("objective", size_key, group_size,
                        f"{o.preset} is defined for groups of {preset.group_size}",
                        nearest=(preset.group_size,), related=("objective.preset",))
    if o.advantage == "gagpo":
        yield Violation("objective", "objective.advantage", o.advantage,
                        "rollouts have one turn: there are no states to compute it from "
                        "(objective eval computes it on a case)",
                        nearest=("group",), related=("objective.preset",))
    if group_size == 1 and o.advantage not in ("reward", "gagpo", "process"):
        yield Violation("group_size", size_key, 1, f"advantage {o.advantage} of a group of one "
                        "is always 0: nothing would be learned", nearest=(2,),
                        related=("objective.advantage",))
    for field, needed in (("subset_size", o.subset != "none"),
                          ("passk_k", o.advantage in ("passk", "pkpo"))):
        if needed and getattr(o, field) > group_size:
            yield Violation("objective", f"objective.{field}", getattr(o, field),
                            f"a group has {group_size} samples", nearest=(group_size,),
                            related=(size_key,))
    if o.llds_weight > 0 and updates == 1 and not staleness:
        yield Violation("objective", "objective.llds_weight", o.llds_weight,
                        "the only update of an on-policy batch has displaced nothing yet",
                        remedy="set batch.updates_per_rollout to 2 or more",
                        related=("batch.updates_per_rollout",))
