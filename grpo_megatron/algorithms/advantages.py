"""Group-relative advantages.

Shape legend: N samples; `group_ids` int64 [N] in 0..Q-1; rewards float [N], NaN: unscorable.
"""

from __future__ import annotations

import torch

EPS = 1e-6  # as verl, slime and NeMo-RL; the papers leave it open
ZERO_VARIANCE = 1e-8


def group_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, *,
                     std: str = "group") -> torch.Tensor:
    """`A_i = (R_i - mean) / (std + eps)`, or without the division.

    GRPO (DeepSeekMath, arXiv:2402.03300); `std="none"` is Dr. GRPO (arXiv:2503.20783). The
    standard deviation is the sample one (n-1). Zero-variance groups (tested on rewards, not on
    the deviation) and groups with one valid sample get exactly 0. Unscorable samples (NaN) leave
    the statistics and get 0.

    Returns:
        float [N], the dtype of `rewards`, detached.
    """
    rewards = rewards.detach()
    num_groups = int(group_ids.max()) + 1 if len(group_ids) else 0
    valid = ~torch.isnan(rewards)
    values = torch.where(valid, rewards, 0.0)
    count = _group_sum(valid.to(rewards.dtype), group_ids, num_groups)
    mean = _group_sum(values, group_ids, num_groups) / count.clamp(min=1)
    centred = torch.where(valid, rewards - mean[group_ids], 0.0)
    spread = _group_extreme(rewards, valid, group_ids, num_groups)
    live = (spread > ZERO_VARIANCE) & (count > 1)
    if std == "group":
        variance = _group_sum(centred**2, group_ids, num_groups) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPS)[group_ids]
    elif std != "none":
        raise ValueError(f"std must be 'none' or 'group', not {std!r}")
    return torch.where(live[group_ids] & valid, centred, 0.0)


def _group_sum(values: torch.Tensor, group_ids: torch.Tensor, num_groups: int) -> torch.Tensor:
    return values.new_zeros(num_groups).index_add(0, group_ids, values)


def _group_extreme(values: torch.Tensor, valid: torch.Tensor, group_ids: torch.Tensor,
                   num_groups: int) -> torch.Tensor:
    """max - min of the valid values of each group; 0 for a group without any."""
    def reduce(fill: float, how: str) -> torch.Tensor:
        start = values.new_full((num_groups,), fill)
        return start.scatter_reduce(0, group_ids, torch.where(valid, values, fill), how)
    spread = reduce(-torch.inf, "amax") - reduce(torch.inf, "amin")
    return torch.where(torch.isfinite(spread), spread, 0.0)
