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
from grpo_megatron.algorithms.stats import Meter, Stats, measure
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

    def by_domain(self, name: str) -> list[float | None]:
        return [getattr(self.config.for_domain(self.own.get(d)), name) for d in self.domains]

    def value(self, name: str, batch: LossBatch) -> float | Tensor:
        """A number where all domains agree, else [n]."""
        return _at_tokens(self.by_domain(name), batch)

    def deltas(self) -> list[float | None]:
        """OPSM's threshold by domain; None: not calibrated yet."""
        return [
            self.state.get(f"opsm_delta@{d}") if delta is None else delta
            for d, delta in zip(self.domains, self.by_domain("opsm_delta"), strict=True)
        ]

    @property
    def exponent(self) -> float:
        return self.state.get("lambda", self.config.lambda_init)

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
    old = batch.rollout_logprobs if o.proximal == "rollout" else batch.old_logprobs
    tokens = terms.Update(
        ratios.bounded(batch.logprobs - old),
        batch.advantages,
        batch.logprobs,
        objective.value("clip_low", batch),
        objective.value("clip_high", batch),
    )
    update = replace(tokens, log_ratio=_log_ratio(o, tokens, batch))
    term = terms.CLIPS[o.clip](o, update)
    status = terms.clip_status(o, tokens if o.clip == "gmpo" else update)
    if batch.decisions is not None and o.clip in ("ppo", "upper"):
        followed = terms.clipped_as(batch.decisions, status)
        term = torch.where(followed, term.detach(), update.log_ratio.exp() * batch.advantages)
    meter = Meter(batch.domain[batch.sample], batch.domain, objective.domains)
    factor, masks = _off_policy_factor(objective, batch, meter.stats)
    losses = -term if factor is None else -(term * factor)
    if objective.weighs_kl and o.kl in terms.KL:
        losses = losses + objective.value("kl_beta", batch) * terms.KL[o.kl](
            batch.untruncated_logprobs, batch.ref_logprobs, tokens.log_ratio
        )
    weight = objective.value("entropy_weight", batch)
    if isinstance(weight, Tensor) or weight != 0:
        losses = losses - weight * batch.entropies
    if o.llds_weight > 0:
        losses = losses + o.llds_weight * terms.llds(
            tokens.log_ratio, batch.advantages, batch.sample, batch.token_counts
        )
    weighted = batch.weights * losses
    loss = weighted.sum()
    if batch.preference is not None:
        coefficient, value = batch.preference
        away = ratios.log_ratio(batch.untruncated_logprobs, batch.ref_logprobs)
        margin = ratios.segment_sum(away, batch.sample, batch.token_counts)
        loss = loss + (coefficient * (margin - margin.detach()) + value).sum()
    measure(
        meter,
        batch,
        update.log_ratio.detach().exp(),
        tokens.log_ratio.detach(),
        clipped=status,
        rejected=masks,
        infinite=infinite,
        factor=factor,
    )
    meter.stats.mean("loss/abs_terms", weighted.abs().sum(), 0.0, "sum")
    meter.stats.decisions = {**status, **masks}
    if batch.decisions is not None:
        differs = [
            torch.zeros_like(infinite),
            *(now != batch.decisions.get(name, now) for name, now in meter.stats.decisions.items()),
        ]
        meter.mean("replay/decisions_changed", torch.stack(differs).any(0))
    if batch.weight_slopes is not None:
        meter.stats.mean("lambda/gradient", (batch.weight_slopes * losses).sum(), 0.0, "sum")
    return loss, meter.stats


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
    o, factor, masks, decisions = objective.config, None, {}, batch.decisions or {}
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
        delta = _at_tokens([torch.inf if d is None else d for d in deltas], batch)
        masks["opsm"] = (batch.advantages < 0) & (distance[batch.sample] > delta)
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
    return replace(
        batch, **{name: torch.where(infinite, 0.0, column) for name, column in columns.items()}
    ), infinite


def _at_tokens(values: Sequence[float], batch: LossBatch) -> float | Tensor:
    if all(value == values[0] for value in values):
        return values[0]
    return batch.logprobs.new_tensor(values)[batch.domain][batch.sample]
