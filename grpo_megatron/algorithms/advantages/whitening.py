"""Standardisation over the whole batch, per domain unless told otherwise."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig


def scope_ids(o: ObjectiveConfig, batch: SampleBatch) -> Tensor:
    """int64 [N]: the domain, or 0 for all (`statistics_scope = "global"` couples domains)."""
    return batch.domains if o.statistics_scope == "domain" else torch.zeros_like(batch.domains)


def whiten(o: ObjectiveConfig, batch: SampleBatch, values: Tensor, valid: Tensor, *,
           per_token: bool) -> Tensor:
    """`(A - mean) / (std + eps)` over the valid samples of the scope; [N], or [n] if `per_token`.
    `whiten = "tokens"` counts every policy token once, so that long samples weigh more."""
    scope = scope_ids(o, batch)
    mass = valid.double()
    if o.whiten == "tokens":
        mass = mass * batch.token_counts
    if per_token:
        sums = batch.sums(values).double()
        means = sums / batch.token_counts.clamp(min=1)
    else:
        means = values
    total = _scoped(mass, scope)
    mean = _scoped(mass * means, scope) / total.clamp(min=1)
    if per_token:
        centred = values - batch.spread(mean.to(values.dtype))
        squares = batch.sums(centred * centred).double() / batch.token_counts.clamp(min=1)
    else:
        centred = values - mean
        squares = centred**2
    divisor = (total - int(o.std_kind == "sample")).clamp(min=1)
    std = (_scoped(mass * squares, scope) / divisor).sqrt() + o.advantage_eps
    scale = torch.where(valid & (std > 0), 1 / std.clamp(min=1e-300), 0.0)
    return centred.mul_(batch.spread(scale.to(values.dtype)) if per_token else scale)


def _scoped(values: Tensor, scope: Tensor) -> Tensor:
    """Sums per scope, broadcast back to samples."""
    return Groups(scope, torch.ones_like(scope, dtype=torch.bool)).sum(values)
