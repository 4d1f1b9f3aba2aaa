"""From per-token losses to one number: a fixed weight for every token.

Weights hold the global denominators. They follow from the token counts of the whole optimizer
step, known before its first micro-batch, so splitting the step differently changes nothing.
"""

from __future__ import annotations

import numpy as np

from grpo_megatron.algorithms.registry import Registry

AGGREGATIONS = Registry("aggregation")


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(token_counts: np.ndarray) -> np.ndarray:
    """`1 / (N_seq T_i)` for every token of sample i (GRPO, GSPO). int [N] -> float64 [N]."""
    return 1.0 / (max(len(token_counts), 1) * np.maximum(token_counts, 1).astype(np.float64))


@AGGREGATIONS.register("token_mean")
def token_mean(token_counts: np.ndarray) -> np.ndarray:
    """`1 / N_tok` (DAPO, arXiv:2503.14476). int [N] -> float64 [N]."""
    return np.full(len(token_counts), 1.0 / max(int(token_counts.sum()), 1))
