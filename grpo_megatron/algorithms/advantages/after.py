"""What happens after estimation: whitening over the batch, and reweighting.

Shape legend: N samples, n policy tokens of all of them, flat."""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups, by_groups, without_rounding
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig

MAX_ENTROPY_FACTOR = 10.0

Shaping = Callable[[ObjectiveConfig, SampleBatch, Groups, Tensor], Tensor]
SHAPINGS: Registry[Shaping] = Registry()
"""`(objective, batch, groups, advantages [N]) -> [N]`, or `[n]` where tokens of a sample differ
(`config.objective.TOKEN_SHAPINGS`)."""


@SHAPINGS.register("eda")
def eda(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, advantages: Tensor) -> Tensor:
    """EDGE-GRPO (arXiv:2507.21848): `A_i mean(H) / H_i`, H_i the sample's mean token entropy,
    masked and detached; `H_i / mean(H)` is kept within [0.1, 10]. [N]"""
    entropy = batch.means(batch.tokens["entropies"]).double()
    mean = groups.mean(entropy)
    share = torch.where(mean > 0, entropy / mean.clamp(min=1e-300), 1.0)
    return advantages / share.clamp(1 / MAX_ENTROPY_FACTOR, MAX_ENTROPY_FACTOR)


@SHAPINGS.register("xrpo")
def xrpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, advantages: Tensor) -> Tensor:
    """XRPO (arXiv:2510.06672): samples with A > 0 gain `min(max(lambda (1 - eta), 0), kappa A)`,
    `eta = exp(score_i - mean score)`, score the mean token log-prob under the old policy, of those
    that are finite. [N]"""
    logprobs = batch.tokens["old_logprobs"]
    is_finite = torch.isfinite(logprobs)
    num_finite = batch.sums(is_finite.to(logprobs.dtype)).clamp(min=1)
    score = (batch.sums(torch.where(is_finite, logprobs, 0.0)) / num_finite).double()
    eta = torch.exp((score - groups.mean(score)).clamp(-20, 20))
    bonus = torch.minimum((o.xrpo_lambda * (1 - eta)).clamp(min=0), o.xrpo_kappa * advantages)
    return torch.where(advantages > 0, advantages + bonus, advantages)


@SHAPINGS.register("trace_recent")
def trace_recent(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, a: Tensor) -> Tensor:
    """GRPO-λ traces (arXiv:2510.00194): `A_t = max(A, trace_min_advantage) (gamma lambda)^(T-1-t)`:
    a rare wrong answer in a group of right ones must not outweigh them all. [n]"""
    return _traced(o, batch, a, SampleBatch.positions_from_end)


@SHAPINGS.register("trace_both")
def trace_both(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, a: Tensor) -> Tensor:
    """Like trace_recent, by the distance to the nearer end: first tokens count fully too. [n]"""
    return _traced(o, batch, a, _distance_to_nearer_end)


@SHAPINGS.register("gtpo_conflict")
def gtpo_conflict(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, a: Tensor) -> Tensor:
    """GTPO (arXiv:2508.03772): a token is in conflict when samples of the group with A > 0 and
    with A < 0 have the same id at the same place, counted from the start or from the end, in an
    unbroken run. Conflict tokens weigh 0 in negative and `conflict_weight` in positive samples.
    Samples with mean entropy over `conflict_entropy_limit` get 0; the others lose
    `conflict_entropy_weight` times it. [n]

    Groups whose advantages are all 0 keep them: the paper lowers the entropy of answers that it
    compares, and where nothing is compared every answer would only become less likely."""

    def of_groups(part: SampleBatch, base: Tensor, is_compared: Tensor) -> Tensor:
        entropy = part.means(part.tokens["entropies"])
        shifted = base - o.conflict_entropy_weight * entropy
        is_live = is_compared & (entropy <= o.conflict_entropy_limit)
        shifted = torch.where(is_live, shifted, 0.0)
        return part.to_tokens(shifted) * conflict_weights(o, part, base.sign())

    is_compared = groups.max(a.abs()) > 0
    return by_groups(batch, of_groups, a, is_compared)


def conflict_weights(o: ObjectiveConfig, part: SampleBatch, sign: Tensor) -> Tensor:
    """Return the factor of every token. sign: [N] in {-1, 0, 1}; float64 [n]."""
    conflict = _run(part, part.positions(), sign) | _run(part, part.positions_from_end(), sign)
    factor = torch.where(sign > 0, o.conflict_weight * sign, sign + 1.0)  # sign + 1: 0 or 1
    return torch.where(conflict, part.to_tokens(factor), 1.0)


def _run(part: SampleBatch, place: Tensor, sign: Tensor) -> Tensor:
    """Return tokens within the unbroken run of conflicts from place 0 on, bool [n].

    place: int64 [n], of each token, from one end of its sample; sign: [N] in {-1, 0, 1}."""
    if not part.num_tokens:
        return torch.zeros(0, dtype=torch.bool)
    longest = int(part.token_counts.max())
    ids = part.tokens["token_ids"]
    num_ids = int(ids.max()) + 1
    key = (part.to_tokens(part.group_ids) * longest + place) * num_ids + ids
    unique, key = torch.unique(key, return_inverse=True)
    token_sign = part.to_tokens(sign)
    not_seen = torch.zeros(len(unique), dtype=torch.bool)
    in_positive = not_seen.index_fill(0, key[token_sign == 1], True)
    in_negative = not_seen.index_fill(0, key[token_sign == -1], True)
    conflict = (in_positive & in_negative)[key]
    never = torch.iinfo(torch.int64).max
    free_place = torch.where(conflict, never, place)
    sample = part.to_tokens(torch.arange(len(part)))
    first_free = torch.full((len(part),), never).scatter_reduce(0, sample, free_place, "amin")
    return place < part.to_tokens(first_free)


def _distance_to_nearer_end(part: SampleBatch) -> Tensor:
    """Return how far each token is from the nearer end of its sample, int64 [n]; 0 for the first
    and the last token."""
    return torch.minimum(part.positions(), part.positions_from_end())


def _traced(
    o: ObjectiveConfig,
    batch: SampleBatch,
    advantages: Tensor,
    distance: Callable[[SampleBatch], Tensor],
) -> Tensor:
    """Return advantages [N] that fade with the distance of a token (int64 [n] of a part), [n]."""
    if o.trace_min_advantage is not None:
        advantages = advantages.clamp(min=o.trace_min_advantage)

    def of_groups(part: SampleBatch, advantage: Tensor) -> Tensor:
        decay = torch.tensor(o.trace_decay, dtype=torch.float64)
        return part.to_tokens(advantage) * torch.pow(decay, distance(part).double())

    return by_groups(batch, of_groups, advantages)


def whiten(
    o: ObjectiveConfig, batch: SampleBatch, values: Tensor, valid: Tensor, *, per_token: bool
) -> Tensor:
    """`(A - mean) / (std + eps)` over the valid samples of the scope; [N], or [n] if `per_token`.
    `whiten = "tokens"` counts every policy token once, so that long samples weigh more. What equals
    the mean but for rounding is exactly 0."""

    def of_samples(found: Tensor) -> Tensor:
        """Return means of samples, [N]."""
        if not per_token:
            return found
        return batch.sums(found).double() / batch.token_counts.clamp(min=1)

    def like_values(found: Tensor) -> Tensor:
        """Return values of samples [N] in the shape of `values`."""
        if not per_token:
            return found
        return batch.to_tokens(found.to(values.dtype))

    scope = Groups(batch.scopes(o.statistics_scope), torch.ones_like(valid))
    magnitudes = values.abs()
    if per_token:
        magnitudes = batch.largest(magnitudes)
    largest = Groups(scope.ids, valid).largest(magnitudes).double()
    mass = valid.double()
    if o.whiten == "tokens":
        mass = mass * batch.token_counts
    total = scope.sum(mass)
    mean = scope.sum(mass * of_samples(values)) / total.clamp(min=1)
    centred = without_rounding(values - like_values(mean), like_values(largest))
    divisor = (total - int(o.std_kind == "sample")).clamp(min=1)
    std = (scope.sum(mass * of_samples(centred**2)) / divisor).sqrt() + o.advantage_eps
    scale = torch.where(valid & (std > 0), 1 / std.clamp(min=1e-300), 0.0)
    return centred.mul_(like_values(scale))
