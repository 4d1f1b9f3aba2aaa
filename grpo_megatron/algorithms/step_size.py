"""How large an optimizer step may be, by how much of its samples is effective.

Shape legend: N samples of the rollout batch."""

from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.config.objective import ObjectiveConfig


def effective_share(batch: SampleBatch, rows: Tensor) -> float:
    """Return `(sum w)^2 / (n sum w^2)` of the n samples `rows` (int64), with w the product of
    pi_old / pi_engine over a sample: the effective sample size as a share of n. 1 on policy and for
    no samples; 1/n where one sample outweighs all."""
    if not len(rows):
        return 1.0
    log_weights = batch.trajectory_log_ratios()[rows]
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum() ** 2 / (weights**2).sum() / len(rows))


def rate_factor(o: ObjectiveConfig, share: float) -> float:
    """Return what the learning rate of a step is multiplied by, at most 1. share:
    `effective_share`."""
    if o.ess_scaling == "none":
        return 1.0
    relative = min(share / o.ess_reference, 1.0)
    if o.ess_scaling == "sqrt":
        return float(relative**0.5)
    return relative
