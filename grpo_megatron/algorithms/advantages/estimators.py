"""The registry of estimators: `(objective, batch, groups) -> float64 [N]` or `[n]`.

`batch.rewards` are after shaping; `groups` holds the groups with the samples that count.
"""

from grpo_megatron.algorithms.registry import Registry

ESTIMATORS = Registry("advantage")
