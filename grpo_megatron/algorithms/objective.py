"""The policy objective: a composition of choices, evaluated on flat policy tokens.

Shape legend: n policy tokens of the S samples in one micro-batch, flat, prompt and padding
already left out; all log-probs at the sampling temperature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_megatron.algorithms.clips import CLIPS, Bounds, clip_status, clipped_as, gmpo_clip
from grpo_megatron.algorithms.kl import KL
from grpo_megatron.algorithms.monitors import Masks, measure
from grpo_megatron.algorithms.off_policy import MISMATCH, off_policy_distance
from grpo_megatron.algorithms.ratios import RATIOS, bounded
from grpo_megatron.algorithms.regularisers import llds
from grpo_megatron.algorithms.stats import Meter, Stats
from grpo_megatron.config.objective import DomainObjective, ObjectiveConfig


@dataclass(frozen=True)
class LossBatch:
    """What an objective may look at. All tensors on one device."""

    logprobs: Tensor  # [n] with gradient
    old_logprobs: Tensor  # [n] proximal policy
    rollout_logprobs: Tensor  # [n] behaviour policy, as the engine reported
    entropies: Tensor  # [n] of the current policy, with gradient
    advantages: Tensor  # [n]
    weights: Tensor  # [n] aggregation weight, holds the global denominators
    sample: Tensor  # int64 [n], 0..S-1
    token_counts: Tensor  # int64 [S]
    domain: Tensor  # int64 [S], 0..D-1
    untruncated_logprobs: Tensor  # [n] with gradient; like `logprobs` unless sampling truncates
    ref_logprobs: Tensor | None = None  # [n], not truncated either
    turn: Tensor | None = None  # int64 [n], 0..: the turn of each token (GAGPO)
    weight_slopes: Tensor | None = None  # [n], by the exponent of lambda_grpo
    preference: Tensor | None = None  # [2, S]: coefficient of the margin, loss
    decisions: Mapping[str, Tensor] | None = None
    """Who was clipped or rejected when this batch was trained, bool [n] by name: to be followed,
    because rounding decides otherwise at a bound."""


@dataclass(frozen=True)
class Objective:
    """Choices, with what each domain sets for itself and what is learned on the way."""

    config: ObjectiveConfig
    domains: Sequence[str] = ("all",)
    own: Mapping[str, DomainObjective] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    """`lambda`: exponent of lambda_grpo; `opsm_delta@DOMAIN`: calibrated thresholds."""

    def by_domain(self, name: str) -> list[float | None]:
        """The value of one setting in every domain."""
        return [getattr(self.config.for_domain(self.own.get(d)), name) for d in self.domains]

    def value(self, name: str, batch: LossBatch) -> float | Tensor:
        """A number where all domains agree, else [n]."""
        return _at_tokens(self.by_domain(name), batch)

    def deltas(self) -> list[float | None]:
        """OPSM's threshold by domain; None: not calibrated yet."""
        fixed = self.by_domain("opsm_delta")
        return [self.state.get(f"opsm_delta@{d}") if delta is None else delta
                for d, delta in zip(self.domains, fixed, strict=True)]

    @property
    def exponent(self) -> float:
        return self.state.get("lambda", self.config.lambda_init)

    @property
    def wants_reference(self) -> bool:
        return self.config.kl != "none" and any(b > 0 for b in self.by_domain("kl_beta"))


def policy_loss(objective: Objective, batch: LossBatch) -> tuple[Tensor, Stats]:
    """Sum over micro-batches and ranks is the loss of the optimizer step; see `aggregation`."""
    o = objective.config
    batch, infinite = _without_infinite(batch)
    old = batch.rollout_logprobs if o.proximal == "rollout" else batch.old_logprobs
    log_diff = bounded(batch.logprobs - old)
    bounds = Bounds(objective.value("clip_low", batch), objective.value("clip_high", batch))
    log_ratio = _log_ratio(o, log_diff, bounds, batch)
    term = CLIPS[o.clip](o, log_ratio, batch.advantages, bounds, batch.logprobs)
    status = clip_status(o, (log_diff if o.clip == "gmpo" else log_ratio).detach(),
                         batch.advantages, bounds)
    if batch.decisions is not None and o.clip in ("ppo", "upper"):
        followed = clipped_as(batch.decisions, status)
        term = torch.where(followed, term.detach(), log_ratio.exp() * batch.advantages)
    factor, masks = _off_policy_factor(objective, batch)
    losses = -term if factor is None else -(term * factor)
    meter = Meter(batch.domain[batch.sample], batch.domain, objective.domains)
    if objective.wants_reference and o.kl in KL.functions:
        beta = objective.value("kl_beta", batch)
        losses = losses + beta * KL[o.kl](batch.untruncated_logprobs, batch.ref_logprobs, log_diff)
    weight = objective.value("entropy_weight", batch)
    if isinstance(weight, Tensor) or weight != 0:
        losses = losses - weight * batch.entropies
    if o.llds_weight > 0:
        losses = losses + o.llds_weight * llds(log_diff, batch.advantages, batch.sample,
                                               batch.token_counts)
    loss = (batch.weights * losses).sum()
    if batch.preference is not None:
        loss = loss + _preference(batch, log_diff)
    measure(meter, batch, log_ratio.detach().exp(), log_diff.detach(),
            Masks(status, factor, masks, infinite))
    meter.stats.mean("loss/abs_terms", (batch.weights * losses).abs().sum(), 0.0, "sum")
    meter.stats.decisions = {**status, **masks}
    if batch.decisions is not None:
        differs = [now != batch.decisions[name] for name, now in meter.stats.decisions.items()
                   if name in batch.decisions]
        meter.mean("replay/decisions_changed", torch.stack(differs).any(0) if differs
                   else torch.zeros_like(infinite))
    if batch.weight_slopes is not None:
        meter.stats.mean("lambda/gradient", (batch.weight_slopes * losses).sum(), 0.0, "sum")
    if o.off_policy_mask == "opsm":
        _keep_distances(meter.stats, objective, batch)
    return loss, meter.stats


def supervised_loss(logprobs: Tensor, weight: float) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of the completions, every token weighing the same. logprobs: [n]"""
    stats = Stats()
    stats.mean("loss/nll", -logprobs.sum(), float(len(logprobs)))
    return -weight * logprobs.sum(), stats


def _log_ratio(o: ObjectiveConfig, log_diff: Tensor, bounds: Bounds, batch: LossBatch) -> Tensor:
    if o.clip == "gmpo":
        held = gmpo_clip(log_diff, batch.advantages, bounds)
        if batch.decisions is not None:
            status = clip_status(o, log_diff.detach(), batch.advantages, bounds)
            held = torch.where(clipped_as(batch.decisions, status), held.detach(), log_diff)
        log_diff = held
    if o.ratio == "turn_geo" and batch.turn is not None:
        return RATIOS[o.ratio](log_diff, batch.turn, torch.bincount(batch.turn))
    return RATIOS[o.ratio](log_diff, batch.sample, batch.token_counts)


def _off_policy_factor(objective: Objective,
                       batch: LossBatch) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What multiplies the surrogate term, [n]; None for 1. Also who was rejected, bool [n]."""
    o, factor, masks = objective.config, None, {}
    if o.mismatch != "none":
        log_rho = bounded(batch.old_logprobs.detach() - batch.rollout_logprobs)
        sums = log_rho.new_zeros(len(batch.token_counts)).index_add(0, batch.sample, log_rho)
        factor = MISMATCH[o.mismatch](o, log_rho, sums, batch.token_counts, batch.sample)
        masks["mismatch"] = factor == 0
        if batch.decisions is not None and "mismatch" in batch.decisions:
            wide = o.model_copy(update={"mismatch_min": 0.0, "mismatch_max": torch.inf})
            free = MISMATCH[o.mismatch](wide, log_rho, sums, batch.token_counts, batch.sample)
            at_bound = masks["mismatch"] & ~batch.decisions["mismatch"]
            factor = torch.where(at_bound, free, factor).masked_fill(
                batch.decisions["mismatch"], 0.0)
    if o.off_policy_mask == "opsm":
        distance = off_policy_distance(batch.rollout_logprobs, batch.logprobs, batch.sample,
                                       batch.token_counts)[batch.sample]
        delta = _at_tokens([torch.inf if d is None else d for d in objective.deltas()], batch)
        masks["opsm"] = (batch.advantages < 0) & (distance > delta)
        rejected = (batch.decisions or {}).get("opsm", masks["opsm"])
        keep = (~rejected).to(batch.logprobs.dtype)
        factor = keep if factor is None else factor * keep
    return factor, masks


def _preference(batch: LossBatch, log_diff: Tensor) -> Tensor:
    coefficient, value = batch.preference
    margin = log_diff.new_zeros(len(batch.token_counts)).index_add(0, batch.sample, log_diff)
    return (coefficient * (margin - margin.detach()) + value).sum()


def _keep_distances(stats: Stats, objective: Objective, batch: LossBatch) -> None:
    """Per-sample distances of the domains whose threshold is still to be calibrated."""
    distance = off_policy_distance(batch.rollout_logprobs, batch.logprobs, batch.sample,
                                   batch.token_counts)
    for number, (name, delta) in enumerate(zip(objective.domains, objective.deltas(),
                                               strict=True)):
        if delta is None:
            stats.samples[name] = distance[batch.domain == number].double()


def _without_infinite(batch: LossBatch) -> tuple[LossBatch, Tensor]:
    """Tokens with an infinite log-prob take no part; returns which, bool [n]. NaN stays: the
    model or the engine is broken, and the trainer stops."""
    columns = {name: column for name in ("logprobs", "old_logprobs", "rollout_logprobs",
                                         "untruncated_logprobs", "ref_logprobs")
               if (column := getattr(batch, name)) is not None}
    infinite = torch.stack([torch.isinf(column.detach()) for column in columns.values()]).any(0)
    if not bool(infinite.any()):
        return batch, infinite
    fields = {name: getattr(batch, name) for name in LossBatch.__dataclass_fields__}
    fields |= {name: torch.where(infinite, 0.0, column) for name, column in columns.items()}
    fields["weights"] = torch.where(infinite, 0.0, batch.weights)
    return LossBatch(**fields), infinite


def _at_tokens(values: Sequence[float], batch: LossBatch) -> float | Tensor:
    if all(value == values[0] for value in values):
        return values[0]
    return batch.logprobs.new_tensor(values)[batch.domain][batch.sample]
