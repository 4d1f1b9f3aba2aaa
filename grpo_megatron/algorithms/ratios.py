"""Update ratios pi_theta / pi_old at token or sequence level.

Shape legend: n policy tokens of S samples, flat; `sample` int64 [n] in 0..S-1.
"""

from __future__ import annotations

import torch

from grpo_megatron.algorithms.registry import Registry

RATIOS = Registry("ratio")
MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; the gradient beyond is zero


@RATIOS.register("token")
def token_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sample: torch.Tensor,
                    token_counts: torch.Tensor) -> torch.Tensor:
    """`log r_t = log pi_theta - log pi_old`, [n] (PPO, GRPO)."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@RATIOS.register("sequence_geo")
def sequence_geo_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor,
                           sample: torch.Tensor, token_counts: torch.Tensor) -> torch.Tensor:
    """`log s_i = (1/T_i) sum_t (log pi_theta - log pi_old)`, given to every token of i, [n].

    Length-normalised (geometric mean) sequence ratio of GSPO, arXiv:2507.18071 eq. 7.
    """
    total = logprobs.new_zeros(len(token_counts)).index_add(0, sample, logprobs - old_logprobs)
    mean = total / token_counts.clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sample]
