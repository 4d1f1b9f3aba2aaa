"""Entropy-weighted rewards of right and of wrong samples (GTPO and GRPO-S, arXiv:2508.04349)."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch, by_groups
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig

MIN_ENTROPY = 1e-6


def gtpo_entropy(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Right samples alive at t: `a1 + a2 d_t H_it / sum_k H_kt`, d_t their number; wrong ones:
    `-(a1 + a2 h_t (1/H_jt) / sum_k 1/H_kt)`. Each pool of a group standardised over its tokens
    (`gtpo_pool = "joint"`: both together, which keeps right above wrong). [n]"""

    def of_groups(part: SampleBatch) -> Tensor:
        shaped, pool, counts = shaped_rewards(o, part)
        return Groups(pool, counts).standardised(shaped, o.std_kind, o.advantage_eps)

    counted = torch.where(groups.valid, batch.rewards, torch.nan)
    return by_groups(replace(batch, rewards=counted), of_groups)


def grpo_s(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """As gtpo_entropy with every sample's mean entropy in place of its tokens'. [N]"""
    entropy = batch.means(batch.tokens["entropies"]).double().clamp(min=MIN_ENTROPY)
    right = batch.rewards >= o.correct_threshold
    pools = groups.ids * 2 + right
    shaped = _shape(o, entropy, right, Groups(pools, groups.valid))
    ids = groups.ids if o.gtpo_pool == "joint" else pools
    return Groups(ids, groups.valid).standardised(shaped, o.std_kind, o.advantage_eps)


def shaped_rewards(o: ObjectiveConfig, part: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Shaped token rewards [n], the pool of every token (int64), and whether it counts."""
    right = part.rewards >= o.correct_threshold
    pools = part.group_ids * 2 + right
    positions = part.positions()
    longest = int(part.token_counts.max()) if len(part) else 0
    counts = part.spread(part.valid)
    alive = Groups(part.spread(pools) * longest + positions, counts)
    entropy = part.tokens["entropies"].clamp(min=MIN_ENTROPY)
    shaped = _shape(o, entropy, part.spread(right), alive)
    return shaped, part.spread(part.group_ids if o.gtpo_pool == "joint" else pools), counts


def _shape(o: ObjectiveConfig, entropy: Tensor, right: Tensor, pool: Groups) -> Tensor:
    measure = torch.where(right, entropy, 1 / entropy)
    portion = pool.count * measure / pool.sum(measure).clamp(min=1e-300)
    return torch.where(right, 1.0, -1.0) * (o.gtpo_alpha1 + o.gtpo_alpha2 * portion)
