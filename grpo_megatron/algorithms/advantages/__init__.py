"""Advantages: from rewards (and sometimes tokens) to what multiplies each token's ratio."""

from grpo_megatron.algorithms.advantages.pipeline import (
    Advantages,
    compute_advantages,
    needed_columns,
)

__all__ = ["Advantages", "compute_advantages", "needed_columns"]
