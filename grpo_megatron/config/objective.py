"""`[objective]` and `[batch]`: the policy-gradient objective as independent choices."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import core_schema

from grpo_megatron import assets
from grpo_megatron.config.base import Strict

_FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A function of one's own, `module:function`."""


class OrFunction:
    """Marks a choice that also takes `module:function`, see `algorithms/custom.py`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def checked(value: Any, check: Callable[[Any], Any]) -> Any:
            if isinstance(value, str) and re.fullmatch(_FUNCTION, value):
                return value
            return check(value)

        return core_schema.no_info_wrap_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": f"^{_FUNCTION}$"}]}


class ObjectivePreset(Strict):
    """A named combination of choices, as `objective_presets.toml` has it."""

    title: str
    source: str
    evidence: Literal["S", "M", "E"]  # see algorithms/catalogue.md
    use: str  # when to choose it
    values: dict[str, Any]  # of ObjectiveConfig; everything else has its default
    group_size: int | None = None  # the only one for which it is defined
    not_trained: str = ""  # how long training refuses it; `objective eval` computes it
    with_data: dict[str, Any] = {}  # what the paper sets outside of [objective] (not applied)


PRESETS = {
    name: ObjectivePreset(**table)
    for name, table in assets.tables(__file__, "objective_presets.toml").items()
}
TOKEN_LEVEL = (
    "process",
    "gtpo_entropy",
    "gagpo",
    "gigpo",
    "otb",
    "gae",
)  # advantages differ from token to token
OF_TURNS = ("gagpo", "gigpo")  # advantages that are made of turns
ONE_TERM_A_SEQUENCE = ("sequence_geo", "sequence_product", "sequence_mean")
"""Ratios that cannot carry advantages of tokens."""
TOKEN_SHAPINGS = ("gtpo_conflict", "trace_recent", "trace_both")


class DomainObjective(Strict):
    """What one domain sets for itself; every sample takes the values of its domain."""

    clip_low: float | None = Field(None, gt=0, le=1)
    """Lower clip distance of the domain; default: that of the objective."""
    clip_high: float | None = Field(None, gt=0)
    """Upper clip distance of the domain."""
    kl_beta: float | None = Field(None, ge=0)
    """Weight of the KL of the domain."""
    entropy_weight: float | None = None
    """Weight of the entropy bonus of the domain."""
    opsm_delta: float | None = Field(None, gt=0)
    """opsm: threshold of the off-policy mask of the domain."""
    trm_max: float | None = Field(None, gt=0)
    """trm: largest divergence of a token in the domain."""
    trm_mean: float | None = Field(None, gt=0)
    """trm: largest mean divergence of a sample in the domain."""


SETTINGS_OF_CHOICES: Mapping[str, Mapping[tuple[str, ...], tuple[str, ...]]] = {
    "advantage": {
        ("passk", "pkpo"): ("passk_k",),
        ("pkpo",): ("pkpo_baseline",),
        ("otb",): ("otb_zero_tail",),
        ("gtpo_entropy", "grpo_s"): ("gtpo_alpha1", "gtpo_alpha2", "gtpo_pool"),
        ("gagpo",): ("gagpo_gamma", "gagpo_lambda"),
        ("gigpo",): ("gigpo_omega", "gigpo_gamma"),
        ("gae",): ("gae_gamma", "gae_lambda"),
    },
    "subset": {("shortest", "token_efficiency", "adaptive"): ("subset_size",)},
    "reward_shaping": {("length_switch",): ("length_switch_fraction", "length_switch_weight")},
    "shaping": {
        ("trace_recent", "trace_both"): ("trace_decay", "trace_min_advantage"),
        ("xrpo",): ("xrpo_lambda", "xrpo_kappa"),
        ("gtpo_conflict",): (
            "conflict_weight",
            "conflict_entropy_limit",
            "conflict_entropy_weight",
        ),
    },
    "clip": {
        ("ppo", "both", "gmpo", "clip_cov", "dppo_tv", "dppo_kl"): ("clip_low",),
        ("ppo", "upper", "both", "gmpo", "clip_cov", "dppo_tv", "dppo_kl"): ("clip_high",),
        ("cispo",): ("ratio_min", "ratio_max"),
        ("sapo",): ("sapo_tau_positive", "sapo_tau_negative"),
        ("vespo",): (
            "vespo_k_positive",
            "vespo_lambda_positive",
            "vespo_k_negative",
            "vespo_lambda_negative",
        ),
        ("topr",): (
            "topr_min_positive",
            "topr_max_positive",
            "topr_min_negative",
            "topr_max_negative",
        ),
        ("drpo",): ("drpo_delta",),
        ("clip_cov", "kl_cov"): ("covariance_share",),
        ("clip_cov",): ("covariance_min", "covariance_max"),
        ("kl_cov",): ("covariance_penalty",),
    },
    "credit": {
        ("future_kl",): (
            "future_kl_half_life",
            "future_kl_min",
            "future_kl_max",
            "future_kl_ratio_max",
            "future_kl_safe_ratio",
        ),
    },
    "aggregation": {
        ("constant",): ("aggregation_length",),
        ("lambda_grpo",): ("lambda_init", "lambda_lr", "lambda_rho"),
    },
    "mismatch": {
        ("icepop", "geometric_mask"): ("mismatch_min",),
        ("tis", "tis_sequence", "mis_sequence", "geometric_mask", "icepop"): ("mismatch_max",),
        ("tis", "tis_sequence", "mis_sequence"): ("mismatch_floor",),
        ("kpop",): ("kpop_threshold",),
    },
    "off_policy_mask": {
        ("opsm",): ("opsm_delta",),
        ("trm",): ("trm_max", "trm_mean"),
        ("m2po",): ("m2po_limit",),
    },
    "ess_scaling": {("sqrt", "linear"): ("ess_reference",)},
}
"""By field that chooses, and what is chosen: settings that only these read; domains' own, too."""
SETTINGS_OF_WEIGHTS: Mapping[str, str] = {"preference_beta": "preference_weight"}
"""By setting, the weight without which nothing reads it."""


class ObjectiveConfig(Strict):
    """Choices left unset take the preset's value; `grpo-megatron objective show` explains each."""

    preset: str = "gspo"
    """Fixed, documented combination of the choices below (`grpo-megatron objective list`)."""

    reward_shaping: Literal["none", "length_switch", "per_token"] = "none"
    """Changes rewards before any statistics."""
    correct_threshold: float = 0.5
    """A sample is correct when its reward is at least this, where the domain's accuracy component
    is not known: in cases of `objective eval`."""
    overlong: Literal["none", "loss", "drop"] = "none"
    """Truncated samples: as others; out of the loss and its denominators; or out of the group
    statistics too."""
    subset: Literal["none", "shortest", "token_efficiency", "adaptive"] = "none"
    """GFPO: train only some samples of each group; the others leave statistics and loss."""
    subset_size: int = Field(8, ge=1)
    """shortest, token_efficiency, adaptive: samples kept per group (`adaptive`: of hard groups; 3/4
    of medium, half of easy ones)."""
    advantage: Annotated[
        Literal[
            "reward",
            "batch",
            "group",
            "rloo",
            "opo",
            "otb",
            "opob",
            "maxrl",
            "process",
            "components",
            "passk",
            "pkpo",
            "best_minus_second",
            "gtpo_entropy",
            "grpo_s",
            "gagpo",
            "gigpo",
            "gae",
        ],
        OrFunction(),
    ] = "group"
    """Estimator."""
    advantage_std: Literal["none", "group", "batch_raw", "batch_residual"] = "none"
    """What centred rewards are divided by."""
    std_kind: Literal["sample", "population"] = "sample"
    """Standard deviations divide by n-1 or by n."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to standard deviations."""
    whiten: Literal["none", "samples", "tokens"] = "none"
    """Standardise advantages over the batch, every sample or every token counting once."""
    statistics_scope: Literal["domain", "global"] = "domain"
    """Batch statistics per domain; `global` couples domains."""
    shaping: Literal["none", "eda", "gtpo_conflict", "trace_recent", "trace_both", "xrpo"] = "none"
    """Reweights advantages after estimation."""
    advantage_clip: float | None = Field(None, gt=0)
    """Last of all, advantages are kept within plus and minus this."""

    ratio: Literal[
        "token",
        "prefix_min",
        "sequence_geo",
        "sequence_token",
        "sequence_product",
        "sequence_mean",
        "turn_geo",
    ] = "token"
    """Level of the update ratio."""
    clip: Annotated[
        Literal[
            "ppo",
            "upper",
            "both",
            "gmpo",
            "cispo",
            "sapo",
            "vespo",
            "topr",
            "dppo_tv",
            "dppo_kl",
            "drpo",
            "clip_cov",
            "kl_cov",
            "none",
        ],
        OrFunction(),
    ] = "ppo"
    """Surrogate term."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """ppo, both, gmpo, clip_cov, dppo_tv, dppo_kl: lower clip distance; the ratio is kept above
    `1 - clip_low` (gmpo: its log above `-clip_low`; dppo_tv, dppo_kl: largest divergence of a token
    that became less likely)."""
    clip_high: float = Field(0.2, gt=0)
    """ppo, upper, both, gmpo, clip_cov, dppo_tv, dppo_kl: upper clip distance; the ratio is kept
    below `1 + clip_high` (gmpo: its log below; dppo_tv, dppo_kl: largest divergence of a token that
    became more likely)."""
    dual_clip: float | None = Field(None, gt=1)
    """Negative advantages: the term is at least `dual_clip * A`."""
    ratio_min: float = Field(0.0, ge=0)
    """cispo: absolute lower bound of the ratio weight."""
    ratio_max: float = Field(5.0, gt=0)
    """cispo: absolute upper bound of the ratio weight."""
    router_shift_floor: float | None = Field(None, gt=0, le=1)
    """Takes each token's ratio, before it is clipped, times `max(gamma, floor)` with
    `gamma = exp(-mean |log p - log p_old|)`, the mean over the experts that the old policy chose
    for the token in each layer, and over the layers: tokens that the routers now see otherwise
    count less (RSPO, arXiv:2510.23027 v2). After the first update of a batch it costs a pass for
    each; before that, gamma is 1."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """sapo: temperature of the soft gate where the advantage is positive."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """sapo: temperature where it is not; higher decays faster off policy."""
    vespo_k_positive: float = Field(2.0, gt=0)
    """vespo: power of the sequence ratio where the advantage is at least 0."""
    vespo_lambda_positive: float = Field(3.0, gt=0)
    """vespo: exponential decay of the sequence ratio where the advantage is at least 0."""
    vespo_k_negative: float = Field(3.0, gt=0)
    """vespo: power where it is negative."""
    vespo_lambda_negative: float = Field(2.0, gt=0)
    """vespo: exponential decay where it is negative."""
    topr_min_positive: float = Field(1.0, ge=0)
    """topr: lowest weight where the advantage is at least 0; 1 and 1: no ratio at all."""
    topr_max_positive: float = Field(1.0, gt=0)
    """topr: highest weight where it is at least 0."""
    topr_min_negative: float = Field(0.0, ge=0)
    """topr: lowest weight where it is negative."""
    topr_max_negative: float = Field(1.0, gt=0)
    """topr: highest weight where it is negative."""
    drpo_delta: float = Field(12.5, gt=0)
    """drpo: change of a token's probability at which its weight is 0 in the harmful direction; the
    smaller, the stronger it is held (12.5, from the paper, never gets there)."""
    credit: Literal["none", "future_kl"] = "none"
    """Weighs the surrogate of every token by what followed it."""
    future_kl_half_life: float = Field(32.0, gt=0)
    """future_kl: tokens after which what follows counts half."""
    future_kl_min: float = Field(1.0, ge=0)
    """future_kl: lowest weight (0.8 for small models, in the authors' scripts)."""
    future_kl_max: float = Field(1.2, gt=0)
    """future_kl: highest weight."""
    future_kl_ratio_max: float = Field(10.0, gt=0)
    """future_kl: tokens with a higher ratio are left out of the sums."""
    future_kl_safe_ratio: float = Field(4.0, gt=0)
    """future_kl: tokens with a negative advantage and a higher ratio have a weight of 0.8 to 1."""
    covariance_share: float = Field(2e-4, gt=0, le=1)
    """clip_cov, kl_cov: share of the step's tokens that are chosen by the covariance of log-prob
    and advantage; at least one token."""
    covariance_min: float = 1.0
    """clip_cov: tokens are chosen among those with a covariance above this."""
    covariance_max: float = 5.0
    """clip_cov: and below this."""
    covariance_penalty: float = Field(1.0, ge=0)
    """kl_cov: weight of `|log r|` at the chosen tokens."""
    top_entropy_share: float = Field(1.0, gt=0, le=1)
    """Share of the step's tokens, those with the highest entropy of the old policy, that keep the
    surrogate; KL and entropy bonus stay, and denominators count all tokens. Below 1 it costs a pass
    of the old policy."""

    aggregation: Annotated[
        Literal[
            "seq_mean_token_mean",
            "token_mean",
            "seq_mean_token_sum",
            "constant",
            "prompt_mean",
            "lambda_grpo",
        ],
        OrFunction(),
    ] = "seq_mean_token_mean"
    """How per-token losses become one number."""
    aggregation_length: int | None = Field(None, ge=1)
    """constant: fixed length that divides; default: `rollout.max_new_tokens`."""
    denominator: Literal["batch", "domain"] = "batch"
    """Count samples and tokens over the batch, or per domain and add the domains' losses."""
    lambda_init: float = Field(0.0, ge=-2, le=2)
    """lambda_grpo: first value of the learnable exponent."""
    lambda_lr: float = Field(1e-2, ge=0)
    """lambda_grpo: learning rate of the exponent."""
    lambda_rho: float = Field(1 / 9, gt=0)
    """lambda_grpo: weight of the length's z-score."""

    kl: Literal["none", "k1", "k2", "is_k2", "k3", "is_k3", "reward_k1"] = "none"
    """Estimator of KL to the reference: in the loss, or (`reward_k1`) in the advantage; with
    advantage gae in the reward of each token, and so in what the critic predicts."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL term."""
    reference_interval: int = Field(0, ge=0)
    """RL steps after which the reference becomes the policy; 0: never."""
    reference_ema: float | None = Field(None, gt=0, lt=1)
    """Every `reference_interval` steps: reference = ema * reference + (1 - ema) * policy."""
    monitor_share: float = Field(1 / 32, ge=0, le=1)
    """Share of a step's samples on which is measured what costs passes of its own: how far the step
    moved the policy, and, where `kl` is set and `kl_beta` is 0, KL to the reference; 0: none."""
    entropy_weight: float = 0.0
    """Entropy bonus: the loss has `-entropy_weight * H`."""

    proximal: Literal["recompute", "rollout", "interpolated"] = "recompute"
    """Old log-probs: from the trainer; the engine's (bypasses the mismatch correction); or between
    the engine's and the present ones, by the staleness of each token, which needs no pass of the
    old policy (A-3PO, arXiv:2512.06547)."""
    mismatch: Literal[
        "none", "tis", "tis_sequence", "mis_sequence", "geometric_mask", "icepop", "kpop"
    ] = "none"
    """Weight for the gap between engine and trainer."""
    mismatch_min: float = Field(0.5, ge=0)
    """icepop, geometric_mask: smallest accepted ratio."""
    mismatch_max: float = Field(2.0, gt=0)
    """tis, tis_sequence, mis_sequence, geometric_mask, icepop: cap (tis, tis_sequence) or largest
    accepted ratio."""
    mismatch_floor: float = Field(0.0, ge=0)
    """tis, tis_sequence: weights below are raised to this; mis_sequence: samples below get weight
    0."""
    kpop_threshold: float = Field(0.1, gt=0)
    """kpop: largest divergence of trainer and engine at a token, in nats."""
    off_policy_mask: Literal["none", "opsm", "trm", "m2po"] = "none"
    """Samples or tokens that lose their surrogate because the policy has left what sampled them."""
    opsm_delta: float | None = Field(None, gt=0)
    """opsm: threshold; default: calibrated on the first step, per domain."""
    trm_max: float | None = Field(0.05, gt=0)
    """trm: largest divergence of a token, in nats; null: tokens are not looked at one by one."""
    trm_mean: float | None = Field(None, gt=0)
    """trm: largest mean divergence over a sample's tokens, in nats; null: no bound."""
    m2po_limit: float = Field(0.04, gt=0)
    """m2po: largest mean of `(log r)^2` over an optimizer step."""

    ess_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Takes the learning rate of an optimizer step times the square root of the share of its
    samples that is effective (for Adam), or times that share (for SGD): `(sum w)^2 / (N sum w^2)`
    with the trajectory ratios `w = pi_old / pi_engine` of its samples (VCPO, arXiv:2602.17616).
    Costs a pass of the old policy."""
    ess_reference: float = Field(1.0, gt=0, le=1)
    """sqrt, linear: the share on policy, above which the learning rate is not scaled; lower where
    trainer and engine are apart on long episodes."""

    rollout_drift_weight: float = Field(0.0, ge=0)
    """Weight of `(log pi_theta - log pi_engine)^2` at every token: holds the policy to the one that
    sampled."""
    positive_nll_weight: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of correct samples, a mean over their tokens."""
    llds_weight: float = Field(0.0, ge=0)
    """Regulariser against lazy likelihood displacement."""
    preference_weight: float = Field(0.0, ge=0)
    """Weight of a preference loss (DPO) on the best and worst sample of each group, against the
    reference."""
    preference_beta: float = Field(0.1, gt=0)
    """Its inverse temperature."""

    passk_k: int = Field(2, ge=1)
    """passk, pkpo: k."""
    pkpo_baseline: bool = True
    """pkpo: subtract the leave-one-out baseline."""
    otb_zero_tail: bool = False
    """otb: no baseline where only the longest sample of a group still has tokens; without it the
    baseline there is the sample's own reward, and they get no gradient."""
    length_switch_fraction: float = Field(0.2, ge=0, le=1)
    """length_switch: share of groups, by success, whose correct answers pay for length."""
    length_switch_weight: float = Field(0.5, gt=0)
    """length_switch: largest penalty."""
    trace_decay: float = Field(0.98, gt=0, le=1)
    """trace: gamma times lambda."""
    trace_min_advantage: float | None = None
    """trace: negative advantages are raised to this (the paper clamps them and gives no value; -1,
    one deviation of the group, in the preset)."""
    xrpo_lambda: float = Field(1.0, ge=0)
    """xrpo: size of the bonus of unlikely right answers."""
    xrpo_kappa: float = Field(0.5, ge=0)
    """xrpo: largest bonus, as a share of the advantage."""
    gtpo_alpha1: float = 1.0
    """gtpo_entropy, grpo_s: weight of the plain reward."""
    gtpo_alpha2: float = 0.1
    """gtpo_entropy, grpo_s: weight of the entropy share."""
    gtpo_pool: Literal["separate", "joint"] = "separate"
    """gtpo_entropy, grpo_s: standardise correct and wrong samples apart, or together."""
    conflict_weight: float = Field(2.0, gt=0)
    """gtpo_conflict: factor of conflict tokens in samples with positive advantage."""
    conflict_entropy_limit: float = Field(0.6931471805599453, gt=0)
    """gtpo_conflict: samples above this mean entropy get advantage 0."""
    conflict_entropy_weight: float = Field(0.1, ge=0)
    """gtpo_conflict: times the mean entropy, subtracted from the advantage."""
    gagpo_gamma: float = Field(1.0, gt=0, le=1)
    """gagpo: discount from turn to turn."""
    gagpo_lambda: float = Field(0.95, ge=0, le=1)
    """gagpo: decay of the differences of later turns."""
    gigpo_omega: float = Field(1.0, ge=0)
    """gigpo: weight of what a turn is worth beside others from the same state."""
    gigpo_gamma: float = Field(0.95, gt=0, le=1)
    """gigpo: discount of the rewards of later turns."""
    gae_gamma: float = Field(1.0, gt=0, le=1)
    """gae: discount from policy token to policy token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """gae: decay of the temporal differences of later tokens; 1: what was earned from the token on
    less its value, 0: the next difference alone."""

    allow: tuple[str, ...] = ()
    """Names of refused but possible combinations that are meant."""
    shuffle_advantages: bool = False
    """Negative control: permute advantages over the batch. Must not learn."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        chosen = {}
        preset = PRESETS.get(data.get("preset", "gspo"))
        if preset is not None:
            chosen.update(preset.values)
        chosen.update(data)
        for key, value in data.items():
            # what a validator returns is checked as Python's, where a list is no tuple
            if isinstance(value, list):
                chosen[key] = tuple(value)
        return chosen

    @property
    def token_level(self) -> bool:
        """Whether advantages differ between the tokens of a sample."""
        return (
            self.advantage in TOKEN_LEVEL
            or self.shaping in TOKEN_SHAPINGS
            or self.kl == "reward_k1"
        )

    def sets(self, name: str) -> bool:
        """Whether a setting is another than that of the preset."""
        usual = type(self).model_fields[name].default
        usual = PRESETS[self.preset].values.get(name, usual)
        return bool(getattr(self, name) != usual)

    def for_domain(self, own: DomainObjective | None) -> Self:
        """The objective of a domain with values of its `own`."""
        if own is None:
            return self
        return self.model_copy(update=own.model_dump(exclude_none=True))


class BatchConfig(Strict):
    """What one RL step is made of."""

    num_prompts: int = Field(32, ge=1, le=100_000)
    """Prompts a step."""
    num_samples_per_prompt: int = Field(16, ge=1, le=100_000)
    """Group size G."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts; the batch is split by prompt."""
    epochs: int = Field(1, ge=1)
    """How many times each batch of rollouts is trained, always in the same updates; old log-probs
    stay those from before the first."""
    max_staleness: int = Field(0, ge=0)
    """0: strictly on-policy. N: rollouts run up to N steps ahead of the step that trains, so that
    step k trains tokens of weight versions k - N to k."""
    too_old: Literal["drop", "mask"] = "drop"
    """Tokens that are older than the bound, where rollouts run ahead: their group is not trained,
    or they alone have no loss."""

    adapt_staleness: bool = False
    """Let rollouts run ahead no further than they need (docs/staleness.md), at least one step and
    at most max_staleness: one step more or less at a time, by the seen durations."""
    added_idle: float = Field(0.02, ge=0, lt=1)
    """With adapt_staleness: the share of time that may be lost for it, against max_staleness."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per RL step: of all epochs."""
        return self.updates_per_rollout * self.epochs
