"""Weights for what the policy gradient did not sample itself. All detached.

Shape legend: n policy tokens of S samples; `rho = pi_old / pi_engine`: trainer against engine,
plus the version lag."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.ratios import bounded, segment_mean, segment_sum
from grpo_megatron.config.objective import ObjectiveConfig

CALIBRATION_QUANTILE, CALIBRATION_FACTOR, CALIBRATION_RANGE = 0.99, 5.0, (0.01, 0.5)


def tis(o: ObjectiveConfig, log_rho: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`min(rho_t, mismatch_max)`: truncated importance sampling per token."""
    return log_rho.exp().clamp(max=o.mismatch_max)


def tis_sequence(o: ObjectiveConfig, log_rho: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`min(prod_t rho_t, mismatch_max)`: high variance for long samples."""
    return bounded(segment_sum(log_rho, sample, counts)).exp().clamp(max=o.mismatch_max)[sample]


def mis_sequence(o: ObjectiveConfig, log_rho: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`prod rho` where it is at most mismatch_max, else 0: long samples are mostly masked."""
    product = bounded(segment_sum(log_rho, sample, counts)).exp()
    return torch.where(product <= o.mismatch_max, product, 0.0)[sample]


def geometric_mask(o: ObjectiveConfig, log_rho: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`rho_t` in samples whose geometric mean of rho is within [mismatch_min, mismatch_max]."""
    mean = bounded(segment_mean(log_rho, sample, counts)).exp()
    keep = (mean >= o.mismatch_min) & (mean <= o.mismatch_max)
    return torch.where(keep[sample], log_rho.exp(), 0.0)


def icepop(o: ObjectiveConfig, log_rho: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`rho_t` where it is within [mismatch_min, mismatch_max], else 0 (IcePop)."""
    rho = log_rho.exp()
    return torch.where((rho >= o.mismatch_min) & (rho <= o.mismatch_max), rho, 0.0)


MISMATCH = {f.__name__: f for f in (tis, tis_sequence, mis_sequence, geometric_mask, icepop)}


def off_policy_distance(rollout: Tensor, logprobs: Tensor, sample: Tensor,
                        counts: Tensor) -> Tensor:
    """`mean_t (log pi_engine - log pi_theta)`, [S]: what OPSM compares with delta. It sees
    staleness and mismatch at once (DeepSeek-V3.2, arXiv:2512.02556)."""
    return segment_mean(rollout - logprobs.detach(), sample, counts)


def calibrated_delta(distances: Tensor) -> float:
    """OPSM's threshold from the samples of the first step: 5 times their 99th percentile, within
    [0.01, 0.5]. distances: [S]. Ours: the paper does not publish a value."""
    low, high = CALIBRATION_RANGE
    if not len(distances):
        return high
    value = CALIBRATION_FACTOR * float(torch.quantile(distances.double(), CALIBRATION_QUANTILE))
    return min(max(value, low), high)
