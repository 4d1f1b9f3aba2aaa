"""Estimators that compare a sample with its group. All return float64 [N]."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.whitening import scope_ids
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig


def reward(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i`, no baseline (REINFORCE++, arXiv:2501.03262, whitens it afterwards)."""
    return torch.where(groups.valid, batch.rewards, 0.0)


def group(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = (R_i - mean) / (std + eps)`, the mean over the group.

    std none: 1 (Dr. GRPO, arXiv:2503.20783); group: of the group (GRPO, arXiv:2402.03300);
    batch_raw: of all rewards of the scope (Lite PPO, arXiv:2508.08221); batch_residual: of all
    centred rewards of the scope. Groups without spread and groups of one get exactly 0."""
    centred = groups.centred(batch.rewards)
    if o.advantage_std == "none":
        return centred
    if o.advantage_std == "group":
        return groups.standardised(batch.rewards, o.std_kind, o.advantage_eps)
    scope = Groups(scope_ids(o, batch), groups.valid)
    values = batch.rewards if o.advantage_std == "batch_raw" else centred
    std = scope.std(values, o.std_kind) + o.advantage_eps
    return torch.where(centred == 0, 0.0, centred / torch.where(std > 0, std, 1.0))


def rloo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i - mean of the others = G / (G - 1) (R_i - mean)` (RLOO, arXiv:2402.14740)."""
    return groups.centred(batch.rewards) * groups.count / (groups.count - 1).clamp(min=1)


def maxrl(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = (R_i - mean) / (mean + eps)`, for rewards of at least 0 (MaxRL)."""
    mean = groups.mean(batch.rewards) + o.advantage_eps
    return torch.where(mean > 0, groups.centred(batch.rewards) / mean, 0.0)


def components(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = sum_k w_k (R_ik - mean_k) / (std_k + eps)`: every reward component standardised.

    MO-GRPO (arXiv:2509.22047) with weights 1; GDPO (arXiv:2601.05242) whitens the sum over the
    batch. A component without spread in the group adds 0, a skipped one (NaN) too."""
    total = torch.zeros_like(batch.rewards)
    for name, values in batch.components.items():
        part = Groups(groups.ids, groups.valid & ~torch.isnan(values))
        scores = part.standardised(values, o.std_kind, o.advantage_eps)
        total += batch.component_weights[name] * scores
    return total


def best_minus_second(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Only the best sample of a group gets `R_max - R_second` (ties: 0)."""
    best = groups.valid & (groups.rank(-batch.rewards, batch.sample_ids) == 0)
    rest = Groups(groups.ids, groups.valid & ~best)
    gap = groups.max(batch.rewards) - rest.max(batch.rewards)
    return torch.where(best & (rest.count > 0), gap, 0.0)
