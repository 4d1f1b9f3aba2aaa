"""Update ratios pi_theta / pi_old at token, turn or sequence level, as logarithms.

Shape legend: n policy tokens of S samples, flat; `segment` int64 [n] in 0..S-1 is the sample (or
the turn) of each token; `counts` int64 [S]. All return [n] with gradient."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; the gradient beyond is zero


def token(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`r_t = pi_theta / pi_old` of each token (PPO, GRPO)."""
    return log_diff


def sequence_geo(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`s_i = exp((1/T_i) sum_t log r_t)`: length-normalised, GSPO (arXiv:2507.18071 eq. 7)."""
    return bounded(segment_mean(log_diff, segment, counts))[segment]


def turn_geo(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """As sequence_geo over the tokens of one action (GAGPO); `segment` holds turns."""
    return sequence_geo(log_diff, segment, counts)


def sequence_token(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """GSPO-token: the value of sequence_geo, the gradient of each token's own log-prob."""
    value = bounded(segment_mean(log_diff.detach(), segment, counts))[segment]
    return value + log_diff - log_diff.detach()


def sequence_product(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`prod_t r_t`: the trajectory ratio (TIC-GRPO, arXiv:2508.02833)."""
    return bounded(segment_sum(log_diff, segment, counts))[segment]


def sequence_mean(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`(1/T_i) sum_t r_t`: mean of the token ratios (GRPO-S, arXiv:2508.04349)."""
    return segment_mean(log_diff.exp(), segment, counts).clamp(min=1e-9).log()[segment]


RATIOS = {f.__name__: f for f in (
    token, sequence_geo, turn_geo, sequence_token, sequence_product, sequence_mean)}


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """`log pi_theta - log pi_old`, bounded; 0 where one is infinite. [n]"""
    difference = logprobs - old
    return torch.where(torch.isinf(difference), 0.0, bounded(difference))


def bounded(values: Tensor) -> Tensor:
    """Keep `exp` finite."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sum(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(len(counts)).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    return segment_sum(values, segment, counts) / counts.clamp(min=1)
