"""What happens before estimation: reward shaping, and which samples of a group train at all."""

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Groups, SampleBatch
from grpo_megatron.config.objective import ObjectiveConfig


def length_switch(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GRPO-λ (arXiv:2505.18086): in the `length_switch_fraction` of groups with the highest
    success (at least one right), right samples earn `1 - weight sigmoid(z)`, z their length's
    z-score among the group's right samples; everywhere else rewards are plain 0 and 1. [N]"""
    right = groups.valid & batch.is_correct(o.correct_threshold)
    success = groups.mean(right.double())
    first = groups.rank(batch.sample_ids.double(), batch.sample_ids) == 0
    leaders = Groups(batch.scopes(o.statistics_scope), first & (groups.count > 0))
    leader_id = groups.min(batch.sample_ids.double()).nan_to_num(posinf=0).long()
    place = leaders.rank(-success, leader_id)
    wanted = torch.floor(o.length_switch_fraction * leaders.count + 1e-9)
    chosen = torch.zeros(groups.size, dtype=torch.bool)
    chosen[groups.ids[first]] = (place < wanted)[first] & (success > 0)[first]
    lengths = batch.token_counts.double()
    pool = Groups(groups.ids, right)
    z = (lengths - pool.mean(lengths)) / (pool.std(lengths, "population") + o.advantage_eps)
    z = torch.where(pool.spread(lengths) > 0, z, 0.0)
    paid = torch.where(chosen[groups.ids], 1 - o.length_switch_weight * torch.sigmoid(z), 1.0)
    return torch.where(torch.isnan(batch.rewards), torch.nan, torch.where(right, paid, 0.0))


def per_token(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`R_i / T_i` (an option of TIC-GRPO, arXiv:2508.02833); rewards brevity strongly. [N]"""
    return batch.rewards / batch.token_counts.clamp(min=1)


def shortest(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GFPO (arXiv:2508.09726): the `subset_size` shortest samples. bool [N]"""
    return groups.valid & (_by_length(batch, groups) < o.subset_size)


def token_efficiency(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GFPO: the `subset_size` samples with the highest reward per token. bool [N]"""
    efficiency = batch.rewards / batch.token_counts.clamp(min=1)
    return groups.valid & (groups.rank(-efficiency, batch.sample_ids) < o.subset_size)


def adaptive(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GFPO, adaptive difficulty: the shortest k samples, by quartiles of groups' mean rewards: the
    easiest keeps 1/2 of `subset_size`, the next 3/4, the harder half of groups all. bool [N]"""
    success = groups.mean(batch.rewards)
    scope = batch.scopes(o.statistics_scope)
    size = torch.empty_like(success)
    for s in scope[groups.valid].unique():
        here = (scope == s) & groups.valid
        of_groups = success[here][np.unique(groups.ids[here], return_index=True)[1]]
        easy, medium = torch.quantile(of_groups, 0.75), torch.quantile(of_groups, 0.5)
        share = torch.where(success > easy, 0.5, torch.where(success > medium, 0.75, 1.0))
        size = torch.where(here, (share * o.subset_size).ceil(), size)
    return groups.valid & (_by_length(batch, groups) < size)


REWARD_SHAPINGS = {f.__name__: f for f in (length_switch, per_token)}
SUBSETS = {f.__name__: f for f in (shortest, token_efficiency, adaptive)}


def _by_length(batch: SampleBatch, groups: Groups) -> Tensor:
    return groups.rank(batch.token_counts.double(), batch.sample_ids)
