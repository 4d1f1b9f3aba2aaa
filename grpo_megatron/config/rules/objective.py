"""Rules between the choices of `[objective]`, and between `[objective]` and `[batch]`."""

from grpo_megatron.config.objective import (
    OF_TURNS,
    ONE_TERM_A_SEQUENCE,
    PRESETS,
    TOKEN_LEVEL,
    BatchConfig,
    ObjectiveConfig,
)
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.suggest import nearest

OBJECTIVE_RULES = RuleSet()
"""Their checks take the objective."""
BATCH_RULES = RuleSet()
"""Of runs that take steps; their checks take the objective and the batch."""

_WITH_SEQUENCES = ("ppo", "upper", "both", "gmpo", "none", "vespo", "topr")
"""Clips that are defined on ratios of sequences and turns, beside those of tokens."""
_WITH_PREFIXES = ("ppo", "cispo", "none")
"""Clips for which the lowest ratio of a prefix is defined."""
_WITH_SHIFTED_ROUTERS = ("ppo", "upper", "both", "gmpo", "cispo", "sapo", "none")
"""Clips that take a ratio as it comes; the others weigh by it in their own way, or read the old
policy's probability from it."""
_TERMS_OF_TOKENS = ("vespo", "topr")
"""Clips that take a sequence's ratio as a weight, and have a term of every token."""
_GROUPS_OF_ONE = ("reward", "batch", "gagpo", "process", "gae")
"""Advantages that compare a sample with more than the rest of its group."""
_DIVIDED_BY_GROUP = ("best_minus_second", "gigpo", "opob")
"""Advantages that a deviation of the group may divide, and none of the batch."""
_WITH_FLOOR = ("tis", "tis_sequence", "mis_sequence")


@OBJECTIVE_RULES.rule("objective")
def the_preset_exists(objective: ObjectiveConfig) -> Violation | None:
    """Refuse an unknown objective preset."""
    if objective.preset in PRESETS:
        return None
    close = nearest(objective.preset, PRESETS)
    remedy = ""
    if not close:
        remedy = "see grpo-megatron objective list"
    return Violation(
        "objective.preset",
        f"no objective preset is called {objective.preset!r}",
        nearest=close,
        remedy=remedy,
    )


# --- advantages


@OBJECTIVE_RULES.rule("objective")
def advantage_is_divided_by_a_deviation(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a deviation for estimators that have no use for it."""
    if objective.advantage_std == "none" or objective.advantage in ("group", "components"):
        return None
    what = "a deviation"
    if objective.advantage in _DIVIDED_BY_GROUP:
        if objective.advantage_std == "group":
            return None
        what = "a deviation of the batch"
    return Violation(
        "objective.advantage_std",
        f"advantage {objective.advantage} is not divided by {what}",
        remedy='set advantage_std = "none"',
        related=("objective.advantage",),
    )


@OBJECTIVE_RULES.rule("objective")
def components_are_standardised(objective: ObjectiveConfig) -> Violation | None:
    """Refuse components on scales of their own: their sum would mean nothing."""
    if objective.advantage != "components" or objective.advantage_std == "group":
        return None
    return Violation(
        "objective.advantage_std",
        "components are standardised in their group",
        remedy='set advantage_std = "group"',
        related=("objective.advantage",),
    )


@OBJECTIVE_RULES.rule("objective")
def shaping_needs_advantages_of_samples(objective: ObjectiveConfig) -> Violation | None:
    """Refuse shaping of advantages that already differ from token to token."""
    of_tokens = objective.advantage in TOKEN_LEVEL or objective.kl == "reward_k1"
    if objective.shaping == "none" or not of_tokens:
        return None
    return Violation(
        "objective.shaping",
        f"{objective.shaping} reweights sample-level advantages",
        remedy="set it to none",
        related=("objective.advantage", "objective.kl"),
    )


@OBJECTIVE_RULES.rule("objective")
def zero_tails_belong_to_otb(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a setting of the token baseline for other estimators."""
    if not objective.otb_zero_tail or objective.advantage == "otb":
        return None
    return Violation(
        "objective.otb_zero_tail",
        f"advantage {objective.advantage} has one baseline for all tokens of a sample",
        nearest=(False,),
        remedy='or set advantage = "otb"',
        related=("objective.advantage",),
    )


@OBJECTIVE_RULES.rule("objective")
def only_advantages_of_samples_are_shuffled(objective: ObjectiveConfig) -> Violation | None:
    """Refuse the negative control where advantages have the length of their sample."""
    if not objective.shuffle_advantages or not objective.token_level:
        return None
    return Violation(
        "objective.shuffle_advantages",
        "advantages differ within a sample, they cannot be permuted over samples",
        remedy="use the control with sample-level advantages",
    )


# --- ratios and clips


@OBJECTIVE_RULES.rule("objective")
def a_sequence_ratio_has_one_advantage(objective: ObjectiveConfig) -> Violation | None:
    """Refuse sequence-level ratios with token-level advantages."""
    if objective.ratio not in ONE_TERM_A_SEQUENCE or not objective.token_level:
        return None
    return Violation(
        "objective.ratio",
        "advantages differ from token to token, one sequence ratio cannot carry them",
        remedy="use sequence_token or token",
        related=("objective.advantage", "objective.shaping", "objective.kl"),
    )


@OBJECTIVE_RULES.rule("objective")
def a_sequence_ratio_has_one_term(objective: ObjectiveConfig) -> Violation | None:
    """Refuse sequence-level ratios in sums over tokens, unless they are allowed."""
    if objective.ratio not in ONE_TERM_A_SEQUENCE:
        return None
    if objective.aggregation == "seq_mean_token_mean":
        return None
    is_luspo = objective.ratio == "sequence_geo" and objective.aggregation == "seq_mean_token_sum"
    if is_luspo or objective.clip in _TERMS_OF_TOKENS:
        return None
    if "sequence_ratio_aggregation" in objective.allow:
        return None
    return Violation(
        "objective.aggregation",
        f"a {objective.ratio} ratio gives one term per sequence; {objective.aggregation} weighs "
        "sequences by length or group",
        remedy='use seq_mean_token_mean, or say allow = ["sequence_ratio_aggregation"]',
        related=("objective.ratio",),
    )


@OBJECTIVE_RULES.rule("objective")
def turn_ratios_need_turns(objective: ObjectiveConfig) -> Violation | None:
    """Refuse ratios of turns without an estimator that knows turns."""
    if objective.ratio != "turn_geo" or objective.advantage in OF_TURNS:
        return None
    return Violation(
        "objective.ratio",
        f"turn ratios need turns ({', '.join(OF_TURNS)})",
        remedy='set ratio = "sequence_geo"',
        related=("objective.advantage",),
    )


@OBJECTIVE_RULES.rule("objective")
def token_clips_have_token_ratios(objective: ObjectiveConfig) -> Violation | None:
    """Refuse clips of tokens with ratios of sequences."""
    if objective.ratio in ("token", "prefix_min") or objective.clip in _WITH_SEQUENCES:
        return None
    if ":" in objective.clip:  # a function of one's own
        return None
    return Violation(
        "objective.clip",
        f"{objective.clip} is defined on token ratios",
        remedy='set ratio = "token"',
        related=("objective.ratio",),
    )


@OBJECTIVE_RULES.rule("objective")
def prefixes_are_weighed_by_some_clips(objective: ObjectiveConfig) -> Violation | None:
    """Refuse the lowest ratio of a prefix for clips that look at a token's own ratio."""
    if objective.ratio != "prefix_min" or objective.clip in _WITH_PREFIXES:
        return None
    if ":" in objective.clip:  # a function of one's own
        return None
    return Violation(
        "objective.ratio",
        f"{objective.clip} is not defined on the lowest ratio of a prefix; "
        f"{', '.join(_WITH_PREFIXES)} are",
        remedy='set ratio = "token" or clip = "cispo"',
        related=("objective.clip",),
    )


@OBJECTIVE_RULES.rule("objective")
def shifted_routers_scale_ratios(objective: ObjectiveConfig) -> Violation | None:
    """Refuse router-shift weights where ratios are more than a factor, or are multiplied up."""
    if objective.router_shift_floor is None:
        return None
    is_known = objective.clip in _WITH_SHIFTED_ROUTERS or ":" in objective.clip
    if is_known and objective.ratio != "sequence_product":
        return None
    what = f"clip {objective.clip} needs the ratio itself"
    if is_known:
        what = "the weights of all tokens of a sequence, multiplied up, leave nothing of it"
    return Violation(
        "objective.router_shift_floor",
        what,
        nearest=("null",),
        remedy='or set clip = "gmpo" and ratio = "sequence_geo"',
        related=("objective.clip", "objective.ratio"),
    )


@OBJECTIVE_RULES.rule("objective")
def gmpo_has_geometric_means(objective: ObjectiveConfig) -> Violation | None:
    """Refuse GMPO without the geometric mean over a sequence."""
    if objective.clip != "gmpo" or objective.ratio == "sequence_geo":
        return None
    return Violation(
        "objective.clip",
        "gmpo clips tokens before their geometric mean",
        remedy='set ratio = "sequence_geo"',
        related=("objective.ratio",),
    )


@OBJECTIVE_RULES.rule("objective")
def vespo_has_sequence_ratios(objective: ObjectiveConfig) -> Violation | None:
    """Refuse VESPO with other ratios than the product over a sequence."""
    if objective.clip != "vespo" or objective.ratio == "sequence_product":
        return None
    return Violation(
        "objective.clip",
        "vespo weighs by the product of a sequence's ratios",
        remedy='set ratio = "sequence_product"',
        related=("objective.ratio",),
    )


@OBJECTIVE_RULES.rule("objective")
def selected_tokens_have_terms_of_their_own(objective: ObjectiveConfig) -> list[Violation]:
    """Refuse a choice of tokens where a sequence has one term, whose gradient all tokens share."""
    if objective.clip in _TERMS_OF_TOKENS:
        return []
    if objective.ratio not in (*ONE_TERM_A_SEQUENCE, "turn_geo"):
        return []
    choices: dict[str, object] = {}
    if objective.top_entropy_share < 1:
        choices["top_entropy_share"] = 1.0
    if objective.off_policy_mask == "m2po":
        choices["off_policy_mask"] = "none"
    found = []
    for field, without_choice in choices.items():
        violation = Violation(
            f"objective.{field}",
            f"a {objective.ratio} ratio gives all tokens of a sequence one term: none can be left "
            "out",
            nearest=(without_choice,),
            remedy="use sequence_token or token",
            related=("objective.ratio",),
        )
        found.append(violation)
    return found


@OBJECTIVE_RULES.rule("objective")
def covariance_bounds_are_in_order(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a lower bound of Clip-Cov that is not below its upper bound."""
    if objective.clip != "clip_cov" or objective.covariance_min < objective.covariance_max:
        return None
    return Violation(
        "objective.covariance_min",
        f"is not below covariance_max {objective.covariance_max:g}: no token is between them",
        remedy="set it below, in the paper 1 and 5",
        related=("objective.covariance_max",),
    )


@OBJECTIVE_RULES.rule("objective")
def dual_clip_belongs_to_ppo(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a dual clip of other surrogates than PPO."""
    if not objective.dual_clip or objective.clip == "ppo":
        return None
    return Violation(
        "objective.dual_clip",
        f"{objective.clip} has no dual clip",
        remedy='set clip = "ppo"',
        related=("objective.clip",),
    )


@OBJECTIVE_RULES.rule("objective")
def cispo_bounds_are_in_order(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a lower bound of CISPO above its upper bound."""
    if objective.clip != "cispo" or objective.ratio_min <= objective.ratio_max:
        return None
    return Violation(
        "objective.ratio_min",
        f"is above ratio_max {objective.ratio_max:g}",
        remedy="swap them",
        related=("objective.ratio_max",),
    )


@OBJECTIVE_RULES.rule("objective")
def topr_bounds_are_in_order(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a lowest weight of TOPR above the highest."""
    if objective.clip != "topr":
        return None
    for sign in ("positive", "negative"):
        lowest = getattr(objective, f"topr_min_{sign}")
        highest = getattr(objective, f"topr_max_{sign}")
        if lowest > highest:
            return Violation(
                f"objective.topr_min_{sign}",
                f"{lowest:g} is above topr_max_{sign} {highest:g}",
                nearest=(highest,),
                remedy="or raise the other",
                related=(f"objective.topr_max_{sign}",),
            )
    return None


# --- KL and the reference


@OBJECTIVE_RULES.rule("objective")
def k1_is_no_loss(objective: ObjectiveConfig) -> Violation | None:
    """Refuse k1 as a loss."""
    if objective.kl != "k1":
        return None
    return Violation(
        "objective.kl",
        "k1 as a loss has an expected gradient of zero: it regularises nothing",
        remedy="use is_k3 or k2 in the loss, or reward_k1",
    )


@OBJECTIVE_RULES.rule("objective")
def a_kl_weight_has_an_estimator(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a weight of a KL term without an estimator."""
    if objective.kl != "none" or objective.kl_beta == 0:
        return None
    return Violation(
        "objective.kl_beta",
        "there is no KL estimator to weigh",
        remedy="set kl, for example is_k3",
        related=("objective.kl",),
    )


@OBJECTIVE_RULES.rule("objective")
def a_moving_reference_is_refreshed(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a moving average that no interval ever updates."""
    if not objective.reference_ema or objective.reference_interval:
        return None
    return Violation(
        "objective.reference_ema",
        "the reference is never refreshed",
        remedy="set reference_interval",
        related=("objective.reference_interval",),
    )


# --- the mismatch of trainer and engine


@OBJECTIVE_RULES.rule("objective")
def mismatch_is_corrected_once(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a correction on top of ratios against the engine's log-probs."""
    if objective.proximal != "rollout" or objective.mismatch == "none":
        return None
    return Violation(
        "objective.mismatch",
        "the ratio to the engine's log-probs already corrects the mismatch: it would be corrected "
        "twice",
        remedy='set mismatch = "none" or proximal = "recompute"',
        related=("objective.proximal",),
    )


@OBJECTIVE_RULES.rule("objective")
def mismatch_bounds_are_in_order(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a smallest accepted ratio above the largest."""
    if objective.mismatch not in ("icepop", "geometric_mask"):
        return None
    if objective.mismatch_min <= objective.mismatch_max:
        return None
    return Violation(
        "objective.mismatch_min",
        f"is above mismatch_max {objective.mismatch_max:g}",
        remedy="swap them",
        related=("objective.mismatch_max",),
    )


@OBJECTIVE_RULES.rule("objective")
def mismatch_floor_has_a_weight(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a floor of weights that are not truncated, or above their cap."""
    if objective.mismatch_floor == 0:
        return None
    if objective.mismatch not in _WITH_FLOOR:
        return Violation(
            "objective.mismatch_floor",
            f"mismatch {objective.mismatch} has no floor; it belongs to {', '.join(_WITH_FLOOR)}",
            nearest=(0.0,),
            remedy="icepop and geometric_mask have mismatch_min",
            related=("objective.mismatch",),
        )
    if objective.mismatch_floor > objective.mismatch_max:
        return Violation(
            "objective.mismatch_floor",
            f"is above mismatch_max {objective.mismatch_max:g}",
            remedy="swap them",
            related=("objective.mismatch_max",),
        )
    return None


@OBJECTIVE_RULES.rule("objective")
def credit_bounds_are_in_order(objective: ObjectiveConfig) -> Violation | None:
    """Refuse a lowest weight of FIPO above the highest."""
    if objective.credit != "future_kl" or objective.future_kl_min <= objective.future_kl_max:
        return None
    return Violation(
        "objective.future_kl_min",
        f"{objective.future_kl_min:g} is above future_kl_max {objective.future_kl_max:g}",
        nearest=(objective.future_kl_max,),
        remedy="or raise future_kl_max",
        related=("objective.future_kl_max",),
    )


@OBJECTIVE_RULES.rule("objective")
def credit_is_of_tokens(objective: ObjectiveConfig) -> Violation | None:
    """Refuse weights of tokens where a sequence has one term, whose gradient all tokens share."""
    if objective.credit == "none" or objective.clip in _TERMS_OF_TOKENS:
        return None
    if objective.ratio not in (*ONE_TERM_A_SEQUENCE, "turn_geo"):
        return None
    return Violation(
        "objective.credit",
        f"a {objective.ratio} ratio gives all tokens of a sequence one term: {objective.credit} "
        "cannot weigh them apart",
        nearest=("none",),
        remedy="use sequence_token or token",
        related=("objective.ratio",),
    )


@OBJECTIVE_RULES.rule("objective")
def a_trust_region_has_a_bound(objective: ObjectiveConfig) -> Violation | None:
    """Refuse trust region masking that masks nothing."""
    if objective.off_policy_mask != "trm":
        return None
    if objective.trm_max is not None or objective.trm_mean is not None:
        return None
    return Violation(
        "objective.trm_max",
        "neither trm_max nor trm_mean is set: no sample can leave the trust region",
        nearest=(0.05,),
        remedy="or set trm_mean, in the paper 0.001",
        related=("objective.trm_mean", "objective.off_policy_mask"),
    )


# --- objective and batch


@BATCH_RULES.rule("group_size")
def groups_of_one_have_an_advantage(
    objective: ObjectiveConfig, batch: BatchConfig
) -> Violation | None:
    """Refuse groups of one where the baseline is the rest of the group."""
    if batch.num_samples_per_prompt > 1 or objective.advantage in _GROUPS_OF_ONE:
        return None
    what = "is always 0: nothing would be learned"
    if objective.advantage == "otb":
        what = 'has no baseline: it would be that of advantage = "reward"'
    return Violation(
        "batch.num_samples_per_prompt",
        f"advantage {objective.advantage} of a group of one {what}",
        nearest=(2,),
        related=("objective.advantage",),
    )


@BATCH_RULES.rule("objective")
def the_preset_has_its_group_size(
    objective: ObjectiveConfig, batch: BatchConfig
) -> Violation | None:
    """Refuse other group sizes than the only one for which a preset is defined."""
    preset = PRESETS.get(objective.preset)
    if preset is None or preset.group_size in (None, batch.num_samples_per_prompt):
        return None
    return Violation(
        "batch.num_samples_per_prompt",
        f"{objective.preset} is defined for groups of {preset.group_size}",
        nearest=(preset.group_size,),
        related=("objective.preset",),
    )


def _more_than_a_group(key: str, batch: BatchConfig) -> Violation:
    size = batch.num_samples_per_prompt
    return Violation(
        key,
        f"a group has {size} samples",
        nearest=(size,),
        related=("batch.num_samples_per_prompt",),
    )


@BATCH_RULES.rule("objective")
def subsets_are_of_a_group(objective: ObjectiveConfig, batch: BatchConfig) -> Violation | None:
    """Refuse subsets that are larger than a group."""
    if objective.subset == "none" or objective.subset_size <= batch.num_samples_per_prompt:
        return None
    return _more_than_a_group("objective.subset_size", batch)


@BATCH_RULES.rule("objective")
def passk_is_of_a_group(objective: ObjectiveConfig, batch: BatchConfig) -> Violation | None:
    """Refuse pass@k of more samples than a group has."""
    uses_k = objective.advantage in ("passk", "pkpo")
    if not uses_k or objective.passk_k <= batch.num_samples_per_prompt:
        return None
    return _more_than_a_group("objective.passk_k", batch)


@BATCH_RULES.rule("objective")
def displaced_likelihood_needs_updates(
    objective: ObjectiveConfig, batch: BatchConfig
) -> Violation | None:
    """Refuse the LLDS term where old and new policy are the same."""
    on_policy = batch.updates_per_step == 1 and batch.max_staleness == 0
    if objective.llds_weight == 0 or not on_policy:
        return None
    return Violation(
        "objective.llds_weight",
        "the only update of an on-policy batch has displaced nothing yet",
        remedy="set batch.updates_per_rollout to 2 or more",
        related=("batch.updates_per_rollout",),
    )
