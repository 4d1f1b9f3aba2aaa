"""The policy objective: a composition of choices, evaluated on flat policy tokens.

Shape legend: n policy tokens of the S samples in one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algorithms import ratios, terms
from grpo_megatron.algorithms.batch import LossBatch
from grpo_megatron.algorithms.custom import function_of, require_shape
from grpo_megatron.algorithms.stats import MetricRecorder, Stats, measure
from grpo_megatron.config.objective import DomainObjective, ObjectiveConfig


@dataclass(frozen=True)
class Objective:
    """Choices, with what each domain sets for itself and what is learned on the way."""

    config: ObjectiveConfig
    domains: Sequence[str] = ("all",)
    own: Mapping[str, DomainObjective] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """What earlier steps taught, ready for JSON. `lambda`: exponent of lambda_grpo;
    `opsm_delta@DOMAIN`: calibrated thresholds; `success` and `success@DOMAIN`: success rates of
    earlier groups (`RunningDistribution.state`), for the adaptive subset."""

    def by_domain(self, name: str) -> list[Any]:
        """The value of a setting in every domain."""
        of_domains = [self.config.for_domain(self.own.get(domain)) for domain in self.domains]
        return [getattr(config, name) for config in of_domains]

    def value(self, name: str, batch: LossBatch) -> float | Tensor:
        """A number where all domains agree, else [n]."""
        return _at_tokens(self.by_domain(name), batch)

    def deltas(self) -> list[float | None]:
        """OPSM's threshold by domain; None: not calibrated yet."""
        found = []
        for domain, delta in zip(self.domains, self.by_domain("opsm_delta"), strict=True):
            if delta is None:
                delta = self.state.get(f"opsm_delta@{domain}")
            found.append(delta)
        return found

    @property
    def exponent(self) -> float:
        """Of lambda_grpo, as learned so far."""
        exponent: float = self.state.get("lambda", self.config.lambda_init)
        return exponent

    @property
    def weighs_kl(self) -> bool:
        """Whether a KL to the reference has a weight in any domain."""
        return self.config.kl != "none" and any(b > 0 for b in self.by_domain("kl_beta"))

    @property
    def wants_reference(self) -> bool:
        """Whether the loss or the advantages are made of the reference's log-probs."""
        return self.weighs_kl or self.config.preference_weight > 0


def policy_loss(objective: Objective, batch: LossBatch) -> tuple[Tensor, Stats]:
    """Loss of one micro-batch, a scalar with gradient, and its metrics. The weights hold the global
    denominators (`step_terms`): losses of all micro-batches and ranks add up to the step's."""
    o = objective.config
    batch, infinite = _without_infinite(batch)
    old_logprobs = batch.rollout_logprobs if o.proximal == "rollout" else batch.old_logprobs
    tokens = terms.Update(
        ratios.bounded(batch.logprobs - old_logprobs),
        batch.advantages,
        batch.logprobs,
        objective.value("clip_low", batch),
        objective.value("clip_high", batch),
    )
    update = replace(tokens, log_ratio=_log_ratio(o, tokens, batch))
    clipped = terms.clip_status(o, tokens if o.clip == "gmpo" else update)
    meter = MetricRecorder(batch.domain[batch.sample], batch.domain, objective.domains)
    factor, rejected = _off_policy_factor(objective, batch, meter.stats)

    losses = -_surrogate(o, update, batch, clipped)
    if factor is not None:
        losses = losses * factor
    if objective.weighs_kl and o.kl in terms.KL:
        divergence = terms.KL[o.kl](batch.untruncated_logprobs, _reference(batch), tokens.log_ratio)
        losses = losses + objective.value("kl_beta", batch) * divergence
    entropy_weight = objective.value("entropy_weight", batch)
    if isinstance(entropy_weight, Tensor) or entropy_weight != 0:
        losses = losses - entropy_weight * batch.entropies
    if o.llds_weight > 0:
        displaced = terms.llds(tokens.log_ratio, batch.advantages, batch.sample, batch.token_counts)
        losses = losses + o.llds_weight * displaced
    weighted = batch.weights * losses
    loss = weighted.sum()
    if batch.preference is not None:
        loss = loss + _preference_loss(batch, batch.preference)

    measure(
        meter,
        batch,
        update.log_ratio.detach().exp(),
        tokens.log_ratio.detach(),
        clipped=clipped,
        rejected=rejected,
        infinite=infinite,
        factor=factor,
    )
    meter.stats.mean("loss/abs_terms", weighted.abs().sum(), 0.0, "sum")
    meter.stats.decisions = {**clipped, **rejected}
    if batch.decisions is not None:
        meter.mean("replay/decisions_changed", _decided_otherwise(batch, meter.stats.decisions))
    if batch.weight_slopes is not None:
        meter.stats.mean("lambda/gradient", (batch.weight_slopes * losses).sum(), 0.0, "sum")
    return loss, meter.stats


def _surrogate(
    o: ObjectiveConfig, update: terms.Update, batch: LossBatch, clipped: Mapping[str, Tensor]
) -> Tensor:
    """What is maximised, [n]; clipped as recorded where the step is replayed."""
    term: Tensor = function_of("clip", o.clip, terms.CLIPS)(o, update)
    require_shape(o.clip, term.shape, update.log_ratio.shape)
    if batch.decisions is None or o.clip not in ("ppo", "upper"):
        return term
    was_clipped = terms.clipped_as(batch.decisions, clipped)
    unclipped = update.log_ratio.exp() * batch.advantages
    return torch.where(was_clipped, term.detach(), unclipped)


def _preference_loss(batch: LossBatch, preference: Tensor) -> Tensor:
    """A scalar with the value and the gradient that `preference_coefficients` fixed."""
    coefficient, value = preference
    away = ratios.log_ratio(batch.untruncated_logprobs, _reference(batch))
    margin = ratios.segment_sum(away, batch.sample, batch.token_counts)
    losses: Tensor = coefficient * (margin - margin.detach()) + value
    return losses.sum()


def _reference(batch: LossBatch) -> Tensor:
    """The reference's log-probs, which `Objective.wants_reference` asks for."""
    assert batch.ref_logprobs is not None
    return batch.ref_logprobs


def _decided_otherwise(batch: LossBatch, decisions: Mapping[str, Tensor]) -> Tensor:
    """Tokens that would be clipped or rejected otherwise than they were recorded, bool [n]."""
    recorded = batch.decisions or {}
    changed = torch.zeros_like(batch.logprobs, dtype=torch.bool)
    for name, now in decisions.items():
        changed = changed | (now != recorded.get(name, now))
    return changed


def _log_ratio(o: ObjectiveConfig, tokens: terms.Update, batch: LossBatch) -> Tensor:
    log_diff = tokens.log_ratio
    if o.clip == "gmpo":
        log_diff = terms.gmpo_clip(tokens)
        if batch.decisions is not None:
            followed = terms.clipped_as(batch.decisions, terms.clip_status(o, tokens))
            log_diff = torch.where(followed, log_diff.detach(), tokens.log_ratio)
    if o.ratio == "turn_geo" and batch.turn is not None:
        return ratios.RATIOS[o.ratio](log_diff, batch.turn, torch.bincount(batch.turn))
    return ratios.RATIOS[o.ratio](log_diff, batch.sample, batch.token_counts)


def _off_policy_factor(
    objective: Objective, batch: LossBatch, stats: Stats
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What multiplies the surrogate term, [n]; None for 1. Also who was rejected, bool [n].

    `stats` keeps the distances by sample of domains whose threshold is still to be calibrated."""
    o = objective.config
    decisions = batch.decisions or {}
    factor: Tensor | None = None
    masks: dict[str, Tensor] = {}
    if o.mismatch != "none":
        log_rho = ratios.bounded(batch.old_logprobs.detach() - batch.rollout_logprobs)
        weigh = partial(
            ratios.MISMATCH[o.mismatch],
            log_rho=log_rho,
            sample=batch.sample,
            counts=batch.token_counts,
        )
        factor = weigh(o)
        masks["mismatch"] = factor == 0
        if "mismatch" in decisions:
            free = weigh(o.model_copy(update={"mismatch_min": 0.0, "mismatch_max": torch.inf}))
            at_bound = masks["mismatch"] & ~decisions["mismatch"]
            factor = torch.where(at_bound, free, factor).masked_fill(decisions["mismatch"], 0.0)
    if o.off_policy_mask == "opsm":
        # staleness and mismatch at once, [S] (DeepSeek-V3.2, arXiv:2512.02556)
        distance = ratios.segment_mean(
            batch.rollout_logprobs - batch.logprobs.detach(), batch.sample, batch.token_counts
        )
        deltas = objective.deltas()
        for number, (name, delta) in enumerate(zip(objective.domains, deltas, strict=True)):
            if delta is None:
                stats.samples[name] = distance[batch.domain == number].double()
        bound = _at_tokens([torch.inf if delta is None else delta for delta in deltas], batch)
        masks["opsm"] = (batch.advantages < 0) & (distance[batch.sample] > bound)
        keep = (~decisions.get("opsm", masks["opsm"])).to(batch.logprobs.dtype)
        factor = keep if factor is None else factor * keep
    return factor, masks


def _without_infinite(batch: LossBatch) -> tuple[LossBatch, Tensor]:
    """Tokens with an infinite log-prob, left out, bool [n]. NaN stays: the trainer stops at it."""
    columns = {
        name: column
        for name in (
            "logprobs",
            "old_logprobs",
            "rollout_logprobs",
            "untruncated_logprobs",
            "ref_logprobs",
        )
        if (column := getattr(batch, name)) is not None
    }
    infinite = torch.stack([torch.isinf(column.detach()) for column in columns.values()]).any(0)
    if not bool(infinite.any()):
        return batch, infinite
    columns["weights"] = batch.weights
    finite: dict[str, Any] = {}
    for name, column in columns.items():
        finite[name] = torch.where(infinite, 0.0, column)
    return replace(batch, **finite), infinite


def _at_tokens(values: Sequence[float], batch: LossBatch) -> float | Tensor:
    if all(value == values[0] for value in values):
        return values[0]
    return batch.logprobs.new_tensor(values)[batch.domain][batch.sample]
