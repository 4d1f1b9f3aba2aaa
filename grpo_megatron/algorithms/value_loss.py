"""The loss of a critic, and how well it predicts.

Shape legend: n policy tokens, flat."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import ValueTargets


def value_losses(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """`1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)` of each token: where V has left
    V_old by more than c towards R, it gets no gradient (PPO's value loss as in arXiv:2005.12729,
    which names it; of arXiv:2203.02155 too). Without a clip, half the squared error.

    values: with gradient; old, returns: [n]. Returns losses, [n], and which are clipped, bool [n].
    """
    squares = (values - returns) ** 2
    if clip is None:
        return squares / 2, torch.zeros_like(values, dtype=torch.bool)
    bounded = values.clamp(old - clip, old + clip)  # exactly the values where they are inside
    bounded_squares = (bounded - returns) ** 2
    return torch.maximum(squares, bounded_squares) / 2, bounded_squares > squares


def explained_variance(targets: ValueTargets) -> float | None:
    """`1 - Var(R - V_old) / Var(R)` over the tokens that count: 1 for a critic that knows, 0 for
    one that says the same everywhere, negative for one that misleads. None where no return differs.
    """
    returns = targets.returns[targets.is_counted]
    values = targets.old[targets.is_counted]
    if len(returns) == 0:
        return None
    variance = returns.var(correction=0)
    if variance <= _NO_VARIANCE:
        return None
    return float(1 - (returns - values).var(correction=0) / variance)


_NO_VARIANCE = 1e-12


def measured(targets: ValueTargets) -> dict[str, float]:
    """Return metrics of a step's values and returns, from before its first update, over the tokens
    that count; equal on all ranks. Empty where none does."""
    if not bool(targets.is_counted.any()):
        return {}
    returns = targets.returns[targets.is_counted]
    values = targets.old[targets.is_counted]
    found = {
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/error": float((values - returns).square().mean().sqrt()),
    }
    explained = explained_variance(targets)
    if explained is not None:
        found["critic/explained_variance"] = explained
    return found
