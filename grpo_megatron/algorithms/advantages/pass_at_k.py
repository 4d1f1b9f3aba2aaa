"""Estimators of the gradient of pass@k, for rewards that are right or wrong. float64 [N]."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig


def passk(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Analytic pass@k advantage (Chen et al., arXiv:2508.10751), n0 wrong of N samples:

    `m = 1 - C(n0,k)/C(N,k)`, `s = sqrt(m (1-m))`; right: `(1-m)/s`;
    wrong: `(1 - m - C(n0-1,k-1)/C(N-1,k-1))/s`; 0 where s is 0 or the group is smaller than k."""
    right, wrong, n = _counts(o, batch, groups)
    mean = 1 - _choose_ratio(wrong, n, o.passk_k)
    std = (mean * (1 - mean)).clamp(min=0).sqrt()
    others = _choose_ratio(wrong - 1, n - 1, o.passk_k - 1)
    value = torch.where(right, 1 - mean, 1 - mean - others) / std.clamp(min=1e-12)
    return torch.where((std > 1e-12) & (n >= o.passk_k), value, 0.0)


def pkpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """PKPO (arXiv:2505.15201): a right sample earns `k/N`, a wrong one `k/N rho(N-1, c, k-1)`,
    with `rho(n, c, k) = 1 - C(n-c,k)/C(n,k)`, c right; less the leave-one-out baseline, the
    same expectation over the sets of k without the sample: `k/N rho(N-1, c_others, k)`."""
    right, wrong, n = _counts(o, batch, groups)
    num_right, share = n - wrong, o.passk_k / n.clamp(min=1)
    with_others = 1 - _choose_ratio(wrong - 1, n - 1, o.passk_k - 1)
    value = torch.where(right, share, share * with_others)
    if o.pkpo_baseline:
        wrong_others = (n - 1) - (num_right - right.double())
        value = value - share * (1 - _choose_ratio(wrong_others, n - 1, o.passk_k))
        value = torch.where(n > o.passk_k, value, 0.0)
    return torch.where(groups.valid & (n >= o.passk_k), value, 0.0)


def _counts(o: ObjectiveConfig, batch: SampleBatch, groups: Groups):
    right = groups.valid & (batch.rewards >= o.correct_threshold)
    return right, groups.sum((~right).double()), groups.count


def _choose_ratio(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """`C(top, k) / C(bottom, k)`, 0 where top < k."""
    ratio = torch.ones_like(top)
    for j in range(k):
        ratio = ratio * (top - j).clamp(min=0) / (bottom - j).clamp(min=1)
    return ratio
