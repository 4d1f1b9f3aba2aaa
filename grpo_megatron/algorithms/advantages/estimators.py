"""The registry of estimators: `(objective, batch, groups) -> float64 [N]` or `[n]`.

`batch.rewards` are after shaping; `groups` holds the groups with the samples that count.
"""

from __future__ import annotations

from grpo_megatron.algorithms.registry import Registry

ESTIMATORS = Registry("advantage")
