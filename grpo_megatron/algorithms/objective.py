"""The policy objective: a composition of choices, evaluated on flat policy tokens.

Shape legend: n policy tokens of the S samples in one micro-batch, flat, prompt and padding
already left out; all log-probs at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_megatron.algorithms.clips import clip_status, ppo_term
from grpo_megatron.algorithms.presets import Choices
from grpo_megatron.algorithms.ratios import RATIOS
from grpo_megatron.algorithms.stats import Stats


@dataclass(frozen=True)
class LossBatch:
    """What an objective may look at. All tensors on one device."""

    logprobs: torch.Tensor  # [n] with gradient
    old_logprobs: torch.Tensor  # [n] proximal policy
    rollout_logprobs: torch.Tensor  # [n] behaviour policy, as the engine reported
    entropies: torch.Tensor  # [n] of the current policy
    advantages: torch.Tensor  # [n]
    weights: torch.Tensor  # [n] aggregation weight, holds the global denominators
    sample: torch.Tensor  # int64 [n], 0..S-1
    token_counts: torch.Tensor  # int64 [S]


def policy_loss(choices: Choices, batch: LossBatch) -> tuple[torch.Tensor, Stats]:
    """Sum over micro-batches and ranks is the loss of the optimizer step; see `aggregation`."""
    log_ratio = RATIOS[choices.ratio](batch.logprobs, batch.old_logprobs, batch.sample,
                                      batch.token_counts)
    term = ppo_term(log_ratio, batch.advantages, choices.clip_low, choices.clip_high)
    loss = -(batch.weights * term).sum()
    stats = Stats()
    count = float(len(batch.logprobs))
    low, high = clip_status(log_ratio, batch.advantages, choices.clip_low, choices.clip_high)
    stats.mean("clip/low_fraction", low.sum(), count)
    stats.mean("clip/high_fraction", high.sum(), count)
    stats.mean("ratio/mean", log_ratio.exp().sum(), count)
    stats.maximum("ratio/max", log_ratio.exp())
    policy_stats(stats, batch)
    stats.mean("loss/abs_terms", (batch.weights * term).abs().sum(), batch.weights.sum())
    return loss, stats


def supervised_loss(batch: LossBatch) -> tuple[torch.Tensor, Stats]:
    """Weighted negative log-likelihood of the completions."""
    stats = Stats()
    stats.mean("loss/nll", -batch.logprobs.sum(), float(len(batch.logprobs)))
    return -(batch.weights * batch.logprobs).sum(), stats


def policy_stats(stats: Stats, batch: LossBatch) -> None:
    """Entropy, and how far trainer and engine are apart on the same tokens.

    `k3` estimates KL(engine || trainer) from the engine's samples: `e^d - d - 1` with
    `d = log pi_trainer - log pi_engine` (Schulman, "Approximating KL divergence").
    """
    count = float(len(batch.logprobs))
    # k3 of a rounding difference is far below fp32's resolution of e^d
    difference = (batch.old_logprobs.detach() - batch.rollout_logprobs).double()
    stats.mean("policy/entropy", batch.entropies.sum(), count)
    stats.mean("mismatch/k3", (torch.expm1(difference) - difference).sum(), count)
    stats.mean("mismatch/abs_mean", difference.abs().sum(), count)
    stats.maximum("mismatch/abs_max", difference.abs())
