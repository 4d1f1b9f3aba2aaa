"""Tokens of an optimizer step that are treated apart: of low entropy, of high covariance, or with
ratios that are far from 1.

All compare tokens over the whole step, so they are chosen before its first micro-batch, from the
old policy's entropies and log-probs: neither the split nor the layout changes the choice. Each
scope of `statistics_scope` chooses among its own tokens.

Shape legend: N samples of the rollout batch with n policy tokens, flat."""

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Advantages, SampleBatch
from grpo_megatron.algorithms.groups import without_rounding
from grpo_megatron.config.objective import ObjectiveConfig

EQUAL_WITHIN = 1e-5
"""Nats by which entropies differ that are the same but for rounding: the samples of a group have
the same policy behind their prompt, and each layout computes it a little differently."""


def low_entropy_tokens(o: ObjectiveConfig, batch: SampleBatch, rows: Tensor) -> Tensor:
    """Return tokens below the `1 - top_entropy_share` quantile of entropy, bool [n]
    (arXiv:2506.01939).

    The quantile is of the samples `rows` (int64), linear between neighbours; tokens at it keep the
    surrogate, so equal entropies all do (`EQUAL_WITHIN`)."""
    entropies = batch.tokens["entropies"].double()
    is_low = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for tokens in _tokens_of_scopes(o, batch, rows):
        of_scope = entropies[tokens]
        threshold = np.quantile(of_scope.numpy(), 1 - o.top_entropy_share)
        is_low[tokens] = of_scope < threshold - EQUAL_WITHIN
    return is_low


def covariant_tokens(
    o: ObjectiveConfig, batch: SampleBatch, advantages: Advantages, rows: Tensor
) -> Tensor:
    """Return tokens that Clip-Cov or KL-Cov treats apart, bool [n] (arXiv:2505.22617).

    The covariance of a token is `(log pi_old - mean) (A - mean)`, means over the tokens of the
    samples `rows` (int64). kl_cov takes the `covariance_share` of tokens with the highest; clip_cov
    as many at random from those between `covariance_min` and `covariance_max`. Ties, and chance,
    are decided by a hash of sample and place."""
    of_tokens = _at_tokens(batch, advantages)
    logprobs = batch.tokens["old_logprobs"].double()
    chance = _hash_of_tokens(batch)
    is_chosen = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for tokens in _tokens_of_scopes(o, batch, rows):
        is_finite = torch.isfinite(logprobs[tokens])
        tokens = tokens[is_finite]
        if not len(tokens):
            continue
        num_chosen = max(int(o.covariance_share * len(tokens)), 1)
        covariance = _centred(logprobs[tokens]) * _centred(of_tokens[tokens])
        if o.clip == "clip_cov":
            is_inside = (covariance > o.covariance_min) & (covariance < o.covariance_max)
            tokens = tokens[is_inside]
            order = np.argsort(chance[tokens.numpy()])
        else:
            order = np.lexsort((chance[tokens.numpy()], -covariance.numpy()))
        is_chosen[tokens[torch.from_numpy(order[:num_chosen])]] = True
    return is_chosen


def outlying_tokens(
    o: ObjectiveConfig, batch: SampleBatch, advantages: Advantages, rows: Tensor
) -> Tensor:
    """Return tokens that M2PO leaves out, bool [n] (arXiv:2510.01161): those with the largest
    `(log pi_old - log pi_engine)^2` among the tokens of the samples `rows` (int64) whose ratio has
    already gone where the advantage pushes, until the mean of the others is `m2po_limit` at most.

    Ties are decided by a hash of sample and place."""
    rollout_logprobs = batch.tokens["rollout_logprobs"].double()
    log_ratio = batch.tokens["sampled_logprobs"].double() - rollout_logprobs
    pushed_further = _at_tokens(batch, advantages) * log_ratio > 0
    is_candidate = torch.isfinite(log_ratio) & pushed_further
    if batch.spoilt is not None:  # without a loss anyway
        is_candidate = is_candidate & ~batch.spoilt
    chance = _hash_of_tokens(batch)
    is_left_out = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for tokens in _tokens_of_scopes(o, batch, rows):
        tokens = tokens[is_candidate[tokens]]
        squares = log_ratio[tokens] ** 2
        order = torch.from_numpy(np.lexsort((chance[tokens.numpy()], squares.numpy())))
        means = squares[order].cumsum(0) / torch.arange(1, len(order) + 1)
        num_kept = int((means <= o.m2po_limit).sum())
        is_left_out[tokens[order[num_kept:]]] = True
    return is_left_out


def _at_tokens(batch: SampleBatch, advantages: Advantages) -> Tensor:
    """Return the advantage of every token, float64 [n]."""
    if advantages.per_token:
        return advantages.values.double()
    return batch.to_tokens(advantages.values.double())


def _centred(values: Tensor) -> Tensor:
    """`x - mean`, [n], exactly 0 where x is the mean but for rounding: such tokens are ties."""
    return without_rounding(values - values.mean(), values.abs().max())


def _tokens_of_scopes(o: ObjectiveConfig, batch: SampleBatch, rows: Tensor) -> list[Tensor]:
    """Return places of the tokens of the samples `rows` in each scope that has any, int64 [n of
    it]."""
    scopes = batch.scopes(o.statistics_scope)[rows]
    found = []
    for scope in scopes.unique():
        tokens = batch.flat_index(rows[scopes == scope])
        if len(tokens):
            found.append(tokens)
    return found


def _hash_of_tokens(batch: SampleBatch) -> np.ndarray:
    """Return a random number for every token, uint64 [n]: equal in every layout, order and
    replay."""
    sample = batch.to_tokens(batch.sample_ids).numpy().astype(np.uint64)
    place = batch.positions().numpy().astype(np.uint64)
    return _mixed(_mixed(sample) ^ place)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele et al., 2014), uint64 [n]."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
