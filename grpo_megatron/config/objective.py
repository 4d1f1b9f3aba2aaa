"""`[objective]` and `[batch]`: the policy-gradient objective as independent choices."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grpo_megatron import assets
from grpo_megatron.config.base import Strict


class ObjectivePreset(Strict):
    title: str
    source: str
    evidence: Literal["S", "M", "E"]  # see algorithms/catalogue.md
    use: str  # when to choose it
    values: dict[str, Any]  # of ObjectiveConfig; everything else has its default
    group_size: int | None = None  # the only one for which it is defined
    with_data: dict[str, Any] = {}  # what the paper sets outside of [objective] (not applied)


PRESETS = {name: ObjectivePreset(**table) for name, table in
           assets.tables(__file__, "objective_presets.toml").items()}
TOKEN_LEVEL = ("process", "gtpo_entropy", "gagpo")  # advantages differ from token to token
TOKEN_SHAPINGS = ("gtpo_conflict", "trace_recent", "trace_both")


class DomainObjective(Strict):
    clip_low: float | None = Field(None, gt=0, le=1)
    clip_high: float | None = Field(None, gt=0)
    kl_beta: float | None = Field(None, ge=0)
    entropy_weight: float | None = None
    opsm_delta: float | None = Field(None, gt=0)


class ObjectiveConfig(Strict):
    preset: str = "gspo"

    reward_shaping: Literal["none", "length_switch", "per_token"] = "none"
    correct_threshold: float = 0.5
    overlong: Literal["none", "loss", "drop"] = "none"
    subset: Literal["none", "shortest", "token_efficiency", "adaptive"] = "none"
    subset_size: int = Field(8, ge=1)
    advantage: Literal["reward", "group", "rloo", "maxrl", "process", "components", "passk", "pkpo",
                       "best_minus_second", "gtpo_entropy", "grpo_s", "gagpo"] = "group"
    advantage_std: Literal["none", "group", "batch_raw", "batch_residual"] = "none"
    std_kind: Literal["sample", "population"] = "sample"
    advantage_eps: float = Field(1e-6, ge=0)
    whiten: Literal["none", "samples", "tokens"] = "none"
    statistics_scope: Literal["domain", "global"] = "domain"
    shaping: Literal["none", "eda", "gtpo_conflict", "trace_recent", "trace_both", "xrpo"] = "none"

    ratio: Literal["token", "sequence_geo", "sequence_token", "sequence_product",
                   "sequence_mean", "turn_geo"] = "token"
    clip: Literal["ppo", "upper", "gmpo", "cispo", "sapo", "none"] = "ppo"
    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    ratio_min: float = Field(0.0, ge=0)
    ratio_max: float = Field(5.0, gt=0)
    sapo_tau_positive: float = Field(1.0, gt=0)
    sapo_tau_negative: float = Field(1.05, gt=0)

    aggregation: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "constant",
                         "prompt_mean", "lambda_grpo"] = "seq_mean_token_mean"
    aggregation_length: int | None = Field(None, ge=1)
    denominator: Literal["batch", "domain"] = "batch"
    lambda_init: float = Field(0.0, ge=-2, le=2)
    lambda_lr: float = Field(1e-2, ge=0)
    lambda_rho: float = Field(1 / 9, gt=0)

    kl: Literal["none", "k1", "k2", "k3", "is_k3", "reward_k1"] = "none"
    kl_beta: float = Field(0.0, ge=0)
    reference_interval: int = Field(0, ge=0)
    reference_ema: float | None = Field(None, gt=0, lt=1)
    monitor_share: float = Field(1 / 32, ge=0, le=1)
    entropy_weight: float = 0.0

    proximal: Literal["recompute", "rollout"] = "recompute"
    mismatch: Literal["none", "tis", "tis_sequence", "mis_sequence", "geometric_mask",
                      "icepop"] = "none"
    mismatch_min: float = Field(0.5, ge=0)
    mismatch_max: float = Field(2.0, gt=0)
    off_policy_mask: Literal["none", "opsm"] = "none"
    opsm_delta: float | None = Field(None, gt=0)

    llds_weight: float = Field(0.0, ge=0)
    preference_weight: float = Field(0.0, ge=0)
    preference_beta: float = Field(0.1, gt=0)

    passk_k: int = Field(2, ge=1)
    pkpo_baseline: bool = True
    length_switch_fraction: float = Field(0.2, ge=0, le=1)
    length_switch_weight: float = Field(0.5, gt=0)
    trace_decay: float = Field(0.98, gt=0, le=1)
    trace_min_advantage: float | None = None
    xrpo_lambda: float = Field(1.0, ge=0)
    xrpo_kappa: float = Field(0.5, ge=0)
    gtpo_alpha1: float = 1.0
    gtpo_alpha2: float = 0.1
    gtpo_pool: Literal["separate", "joint"] = "separate"
    conflict_weight: float = Field(2.0, gt=0)
    conflict_entropy_limit: float = Field(0.6931471805599453, gt=0)
    conflict_entropy_weight: float = Field(0.1, ge=0)
    gagpo_gamma: float = Field(1.0, gt=0, le=1)
    gagpo_lambda: float = Field(0.95, ge=0, le=1)

    allow: tuple[str, ...] = ()
    shuffle_advantages: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = PRESETS.get(data.get("preset", "gspo"))
        # what a validator returns is checked as Python's, where a list is no tuple
        data = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        return {**preset.values, **data} if preset else data

    @property
    def token_level(self) -> bool:
        return (self.advantage in TOKEN_LEVEL or self.shaping in TOKEN_SHAPINGS
                or self.kl == "reward_k1")

    def for_domain(self, own: DomainObjective | None) -> Self:
        return self.model_copy(update=own.model_dump(exclude_none=True)) if own else self


class BatchConfig(Strict):
    num_prompts: int = Field(32, ge=1)
    num_samples_per_prompt: int = Field(16, ge=1)
    updates_per_rollout: int = Field(1, ge=1)
    max_staleness: int = Field(0, ge=0, le=1)
