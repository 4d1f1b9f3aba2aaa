"""Clipped surrogate terms, per token, to be maximised."""

from __future__ import annotations

import torch


def ppo_term(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float,
             clip_high: float) -> torch.Tensor:
    """`min(r A, clip(r, 1 - low, 1 + high) A)`, [n] (PPO, arXiv:1707.06347; asymmetric: DAPO)."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def clip_status(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float,
                clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip removes the gradient: (low, high) bool [n]; A = 0 has no clip status."""
    ratio = log_ratio.detach().exp()
    return ((ratio < 1.0 - clip_low) & (advantages < 0),
            (ratio > 1.0 + clip_high) & (advantages > 0))
