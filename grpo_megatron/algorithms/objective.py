"""The policy objective: a composition of choices, evaluated on flat policy tokens.

Shape legend: n policy tokens of the S samples in one micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algorithms import ratios, terms
from grpo_megatron.algorithms.batch import ClipInputs, LossBatch, MismatchInputs
from grpo_megatron.algorithms.custom import require_gradient, require_shape, result_of
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.algorithms.stats import MetricRecorder, Stats, measure
from grpo_megatron.config.objective import DomainObjective, ObjectiveConfig
from grpo_megatron.device_copies import to_device


@dataclass(frozen=True)
class Objective:
    """Choices, with what each domain sets for itself and what is learned on the way."""

    config: ObjectiveConfig
    domains: Sequence[str] = ("all",)
    own: Mapping[str, DomainObjective] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """What was learned from earlier steps, ready for JSON. `lambda`: exponent of lambda_grpo;
    `opsm_delta@DOMAIN`: calibrated thresholds; `success` and `success@DOMAIN`: success rates of
    earlier groups (`RunningDistribution.state`), for the adaptive subset."""

    def by_domain(self, name: str) -> list[Any]:
        """Return the value of a setting in every domain, in their order."""
        values = []
        for domain in self.domains:
            config = self.config.for_domain(self.own.get(domain))
            values.append(getattr(config, name))
        return values

    def value(self, name: str, batch: LossBatch) -> float | Tensor:
        """Return a number where all domains agree, else [n]."""
        return _at_tokens(self.by_domain(name), batch)

    def deltas(self) -> list[float | None]:
        """Return OPSM's threshold by domain; None: not calibrated yet."""
        found = []
        for domain, delta in zip(self.domains, self.by_domain("opsm_delta"), strict=True):
            if delta is None:
                delta = self.state.get(f"opsm_delta@{domain}")
            found.append(delta)
        return found

    @property
    def exponent(self) -> float:
        """The exponent of lambda_grpo, as learned so far."""
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
    """Return the loss of one micro-batch, a scalar with gradient, and its metrics. The weights hold
    the global denominators (`aggregation`): losses of all micro-batches and ranks add up to the
    step's.

    Raises ConfigError where a custom clip cannot be imported or called, or returns something else
    than [n] with gradient."""
    o = objective.config
    batch, infinite = _without_infinite(batch)
    batch = _with_proximal(o, _without_spoilt(batch))
    meter = MetricRecorder(batch.domain[batch.sample], batch.domain, objective.domains)
    of_tokens = _clip_inputs(objective, batch)
    log_diff = of_tokens.log_ratio
    if o.router_shift_floor is not None and batch.router_shift is not None:
        shift = _router_shift(o.router_shift_floor, batch.router_shift, meter)
        of_tokens = replace(of_tokens, log_ratio=log_diff + shift.log().to(log_diff.dtype))
    of_ratios = replace(of_tokens, log_ratio=_log_ratio(o, of_tokens, batch))
    held = of_ratios
    if o.clip == "gmpo":  # it clips tokens, before their mean
        held = of_tokens
    clipped = terms.clip_status(o, held)
    factor, rejected = _off_policy_factor(objective, batch, meter.stats)

    losses = -_surrogate(o, of_ratios, batch, clipped)
    if factor is not None:
        losses = losses * factor
    if o.credit != "none":
        credit = CREDITS[o.credit](o, log_diff.detach(), batch)
        losses = losses * credit
        meter.set_mean("credit/mean", credit)
    losses = _regularised(objective, batch, losses, log_diff)
    weighted = batch.weights * losses
    loss = weighted.sum()
    if batch.positive_weights is not None:
        loss = loss - (batch.positive_weights * batch.logprobs).sum()
    if batch.preference is not None:
        loss = loss + _preference_loss(batch, batch.preference)

    measure(
        meter,
        batch,
        of_ratios.log_ratio.detach().exp(),
        log_diff.detach(),
        clipped=clipped,
        rejected=rejected,
        infinite=infinite,
        factor=factor,
    )
    meter.stats.set_mean("loss/abs_terms", weighted.abs().sum(), 0.0, "sum")
    meter.stats.masks = {**clipped, **rejected}
    if batch.replayed_masks is not None:
        changed = _masked_otherwise(batch, batch.replayed_masks, meter.stats.masks)
        meter.set_mean("replay/decisions_changed", changed)
    if batch.weight_slopes is not None:
        meter.stats.set_mean("lambda/gradient", (batch.weight_slopes * losses).sum(), 0.0, "sum")
    return loss, meter.stats


def _clip_inputs(objective: Objective, batch: LossBatch) -> ClipInputs:
    """Return what the clip looks at, with the ratio of each token."""
    old_logprobs = batch.old_logprobs
    if objective.config.proximal == "rollout":
        old_logprobs = batch.rollout_logprobs
    return ClipInputs(
        log_ratio=ratios.bounded(batch.logprobs - old_logprobs),
        advantages=batch.advantages,
        logprobs=batch.logprobs,
        old_logprobs=old_logprobs,
        low=objective.value("clip_low", batch),
        high=objective.value("clip_high", batch),
        covariant=batch.covariant,
    )


def _router_shift(floor: float, shift: Tensor, meter: MetricRecorder) -> Tensor:
    """Return what ratios are multiplied by where routers have shifted, [n]: at least `floor`."""
    meter.set_mean("router_shift/mean", shift)
    meter.set_mean("router_shift/floored_fraction", shift < floor)
    return shift.clamp(min=floor)


def _regularised(
    objective: Objective, batch: LossBatch, losses: Tensor, log_diff: Tensor
) -> Tensor:
    """Add to the losses what is not policy gradient: KL, entropy, drift, LLDS. All [n].

    log_diff: `log pi_theta - log pi_old` of each token."""
    o = objective.config
    if objective.weighs_kl and o.kl in terms.KL:
        divergence = terms.KL[o.kl](batch.untruncated_logprobs, _reference(batch), log_diff)
        losses = losses + objective.value("kl_beta", batch) * divergence
    entropy_weight = objective.value("entropy_weight", batch)
    if isinstance(entropy_weight, Tensor) or entropy_weight != 0:
        losses = losses - entropy_weight * batch.entropies
    if o.rollout_drift_weight > 0:
        drift = ratios.bounded(batch.logprobs - batch.rollout_logprobs)
        losses = losses + o.rollout_drift_weight * drift**2
    if o.llds_weight > 0:
        displaced = terms.llds(log_diff, batch.advantages, batch.sample, batch.token_counts)
        losses = losses + o.llds_weight * displaced
    return losses


def _surrogate(
    o: ObjectiveConfig, inputs: ClipInputs, batch: LossBatch, clipped: Mapping[str, Tensor]
) -> Tensor:
    """Return the surrogate, which is maximised, [n]; clipped as recorded where the step is
    replayed."""
    recorded = batch.replayed_masks
    if recorded is not None and "covariance" in recorded:
        inputs = replace(inputs, covariant=recorded["covariance"])
    term: Tensor = result_of("clip", o.clip, terms.CLIPS, o, inputs)
    require_shape("clip", o.clip, term, inputs.log_ratio.shape)
    if inputs.log_ratio.requires_grad:
        require_gradient(o.clip, getattr(term, "requires_grad", False))
    if recorded is None or not terms.follows_recorded_clips(o):
        return term
    was_clipped = terms.clipped_as(recorded, clipped)
    return torch.where(was_clipped, term.detach(), terms.unclipped(o, inputs))


def _preference_loss(batch: LossBatch, preference: Tensor) -> Tensor:
    """Return a scalar with the value and the gradient that `preference_coefficients` fixed."""
    coefficient, value = preference
    away = ratios.log_ratio(batch.untruncated_logprobs, _reference(batch))
    margin = ratios.segment_sum(away, batch.sample, batch.token_counts)
    losses: Tensor = coefficient * (margin - margin.detach()) + value
    return losses.sum()


def _reference(batch: LossBatch) -> Tensor:
    """Return the reference's log-probs, which `Objective.wants_reference` asks for."""
    assert batch.ref_logprobs is not None
    return batch.ref_logprobs


def _masked_otherwise(
    batch: LossBatch, recorded: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> Tensor:
    """Return which tokens would be clipped or rejected otherwise than was recorded, bool [n]."""
    changed = torch.zeros_like(batch.logprobs, dtype=torch.bool)
    for name, now in masks.items():
        changed = changed | (now != recorded.get(name, now))
    return changed


def _log_ratio(o: ObjectiveConfig, of_tokens: ClipInputs, batch: LossBatch) -> Tensor:
    """Return the logarithm of the update ratio at its level, with gradient, [n]."""
    log_diff = of_tokens.log_ratio
    if o.clip == "gmpo":
        log_diff = _clipped_tokens(o, of_tokens, batch)
    segment = batch.sample
    num_tokens = batch.token_counts
    if o.ratio == "turn_geo" and batch.turn is not None:
        segment = batch.turn
        num_tokens = torch.bincount(batch.turn)
    return ratios.RATIOS[o.ratio](log_diff, segment, num_tokens)


def _clipped_tokens(o: ObjectiveConfig, of_tokens: ClipInputs, batch: LossBatch) -> Tensor:
    """Return GMPO's clipped logarithms of the tokens' ratios, with gradient, [n]; clipped as
    recorded where the step is replayed."""
    clipped: Tensor = terms.gmpo_clip(of_tokens)
    if batch.replayed_masks is None:
        return clipped
    now = terms.clip_status(o, of_tokens)
    was_clipped = terms.clipped_as(batch.replayed_masks, now)
    return torch.where(was_clipped, clipped.detach(), of_tokens.log_ratio)


_NO_MISMATCH_BOUNDS = {
    "mismatch_min": 0.0,
    "mismatch_max": torch.inf,
    "mismatch_floor": 0.0,
    "kpop_threshold": torch.inf,
}


def _off_policy_factor(
    objective: Objective, batch: LossBatch, stats: Stats
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return what multiplies the surrogate term, [n] (None: 1), and who was rejected, bool [n] by
    name.

    `stats` keeps the distances by sample of domains whose threshold is still to be calibrated."""
    o = objective.config
    replayed = batch.replayed_masks or {}
    factor: Tensor | None = None
    masks: dict[str, Tensor] = {}
    if o.mismatch != "none":
        factor = _mismatch_factor(o, batch)
        masks["mismatch"] = factor == 0
        if "mismatch" in replayed:
            unbounded = o.model_copy(update=_NO_MISMATCH_BOUNDS)
            was_kept = masks["mismatch"] & ~replayed["mismatch"]
            factor = torch.where(was_kept, _mismatch_factor(unbounded, batch), factor)
            factor = factor.masked_fill(replayed["mismatch"], 0.0)
    if o.off_policy_mask != "none":
        name = o.off_policy_mask
        masks[name] = OFF_POLICY_MASKS[name](objective, batch, stats)
        factor = _without(factor, replayed.get(name, masks[name]), batch)
    if batch.low_entropy is not None:
        masks["low_entropy"] = batch.low_entropy
        factor = _without(factor, replayed.get("low_entropy", batch.low_entropy), batch)
    return factor, masks


def _without(factor: Tensor | None, rejected: Tensor, batch: LossBatch) -> Tensor:
    """Return the factor (None: 1) with 0 for rejected tokens (bool [n]). [n]"""
    keep = (~rejected).to(batch.logprobs.dtype)
    if factor is None:
        return keep
    return factor * keep


def _mismatch_factor(o: ObjectiveConfig, batch: LossBatch) -> Tensor:
    """Return the correction for the mismatch of trainer and engine, detached, [n]."""
    inputs = MismatchInputs(
        batch.old_logprobs, batch.rollout_logprobs, batch.sample, batch.token_counts
    )
    return ratios.mismatch_weights(o, inputs)


OFF_POLICY_MASKS: Registry[Callable[[Objective, LossBatch, Stats], Tensor]] = Registry()
"""Tokens that lose their surrogate: `(objective, batch, stats) -> bool [n]`."""


@OFF_POLICY_MASKS.register("opsm")
def opsm(objective: Objective, batch: LossBatch, stats: Stats) -> Tensor:
    """Samples with A < 0 and `(1/T_i) sum_t (log pi_engine - log pi_theta) > opsm_delta`: staleness
    and mismatch at once (DeepSeek-V3.2, arXiv:2512.02556)."""
    distance = ratios.segment_mean(
        batch.rollout_logprobs - batch.logprobs.detach(), batch.sample, batch.token_counts
    )
    bounds = []
    for number, delta in enumerate(objective.deltas()):
        if delta is None:  # not calibrated yet: nobody is rejected
            here = batch.domain == number
            stats.samples[objective.domains[number]] = torch.where(
                here, distance.double(), torch.nan
            )
            delta = torch.inf
        bounds.append(delta)
    return (batch.advantages < 0) & (distance[batch.sample] > _at_tokens(bounds, batch))


@OFF_POLICY_MASKS.register("trm")
def trust_region(objective: Objective, batch: LossBatch, stats: Stats) -> Tensor:
    """Samples that have left the trust region around the engine's policy: `max_t k2_t > trm_max` or
    `(1/T_i) sum_t k3_t > trm_mean`, with `k2 = (log r)^2 / 2` and `k3 = r - 1 - log r` of
    `r = pi_theta / pi_engine` (Trust Region Masking, arXiv:2512.23075, whose estimates these are
    where the engine's logits are not at hand)."""
    log_ratio = ratios.bounded(batch.logprobs.detach() - batch.rollout_logprobs).double()
    largest = ratios.segment_max(log_ratio**2 / 2, batch.sample, batch.token_counts)
    k3 = torch.expm1(log_ratio) - log_ratio
    mean = ratios.segment_mean(k3, batch.sample, batch.token_counts)
    is_outside = torch.zeros_like(batch.advantages, dtype=torch.bool)
    for name, divergence in (("trm_max", largest), ("trm_mean", mean)):
        bounds = []
        for bound in objective.by_domain(name):
            if bound is None:
                bound = torch.inf
            bounds.append(bound)
        is_outside = is_outside | (divergence[batch.sample] > _at_tokens(bounds, batch))
    return is_outside


@OFF_POLICY_MASKS.register("m2po")
def second_moment(objective: Objective, batch: LossBatch, stats: Stats) -> Tensor:
    """Among the tokens that the step makes likelier though they already are (A > 0, r > 1), or less
    likely (A < 0, r < 1), those with the largest `(log r)^2`, as many as it takes for the mean of
    the others to be `m2po_limit` at most (M2PO, arXiv:2510.01161; `algorithms.token_selection`).
    `r = pi_old / pi_engine`, over the whole optimizer step. Refused where a ratio of sequences or
    turns gives all of their tokens one term."""
    assert batch.outlying is not None  # see `LossConstants.outlying`
    return batch.outlying


CREDITS: Registry[Callable[[ObjectiveConfig, Tensor, LossBatch], Tensor]] = Registry()
"""Weights of the surrogate by what followed a token: `(objective, log_ratio, batch) -> [n]`,
detached; log_ratio: [n] of tokens, detached."""
_SAFE_CREDIT = (0.8, 1.0)


@CREDITS.register("future_kl")
def future_kl(o: ObjectiveConfig, log_ratio: Tensor, batch: LossBatch) -> Tensor:
    """`clip(exp(sum_{u >= t} gamma^(u-t) log r_u), future_kl_min, future_kl_max)`, detached, with
    `gamma = 2^(-1 / future_kl_half_life)`: tokens weigh more after which the policy came to answer
    so more often (FIPO, arXiv:2603.19835). Tokens with r > future_kl_ratio_max are left out of the
    sum; where A < 0 and r > future_kl_safe_ratio, the weight is 0.8 to 1."""
    ratio = log_ratio.exp()
    counted = torch.where(ratio > o.future_kl_ratio_max, 0.0, log_ratio)
    gamma = 2.0 ** (-1.0 / o.future_kl_half_life)
    future = ratios.discounted_from(counted, batch.sample, gamma)
    weight = future.exp().clamp(o.future_kl_min, o.future_kl_max)
    is_unsafe = (batch.advantages < 0) & (ratio > o.future_kl_safe_ratio)
    return torch.where(is_unsafe, weight.clamp(*_SAFE_CREDIT), weight)


def _with_proximal(o: ObjectiveConfig, batch: LossBatch) -> LossBatch:
    """Return the batch with the old log-probs that `objective.proximal` interpolates, where it
    does."""
    if o.proximal != "interpolated":
        return batch
    staleness = batch.staleness
    if staleness is None:
        staleness = torch.zeros_like(batch.sample)
    old_logprobs = ratios.interpolated(batch.logprobs, batch.rollout_logprobs, staleness)
    return replace(batch, old_logprobs=old_logprobs)


def _without_infinite(batch: LossBatch) -> tuple[LossBatch, Tensor]:
    """Leave out tokens with an infinite log-prob; returns the batch, and which these are, bool [n].
    NaN stays: the trainer stops at it."""
    columns = {
        "logprobs": batch.logprobs,
        "old_logprobs": batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "untruncated_logprobs": batch.untruncated_logprobs,
    }
    if batch.ref_logprobs is not None:
        columns["ref_logprobs"] = batch.ref_logprobs
    infinite = ratios.infinite_tokens(*columns.values())
    # without asking whether there are any, for which the host would wait
    columns["weights"] = batch.weights
    if batch.weight_slopes is not None:
        columns["weight_slopes"] = batch.weight_slopes
    finite: dict[str, Any] = {}
    for name, column in columns.items():
        finite[name] = torch.where(infinite, 0.0, column)
    return replace(batch, **finite), infinite


def _without_spoilt(batch: LossBatch) -> LossBatch:
    """Return the batch in which tokens of spoilt turns have weight 0 and no gradient, which a ratio
    of their whole sequence would give them; their values stay."""
    if batch.spoilt is None:
        return batch
    spoilt = batch.spoilt
    changed: dict[str, Any] = {"weights": torch.where(spoilt, 0.0, batch.weights)}
    for name in ("logprobs", "untruncated_logprobs", "entropies"):
        column = getattr(batch, name)
        changed[name] = torch.where(spoilt, column.detach(), column)
    for name in ("positive_weights", "weight_slopes"):
        weights = getattr(batch, name)
        if weights is not None:
            changed[name] = torch.where(spoilt, 0.0, weights)
    return replace(batch, **changed)


def _at_tokens(values: Sequence[float], batch: LossBatch) -> float | Tensor:
    """Return a number where all domains have the same, else each token's own, [n]."""
    if all(value == values[0] for value in values):
        return values[0]
    by_domain = torch.tensor(values, dtype=batch.logprobs.dtype)
    return to_device(by_domain, batch.logprobs.device)[batch.domain][batch.sample]
