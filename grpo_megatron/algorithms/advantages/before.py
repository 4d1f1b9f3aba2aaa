"""What happens before estimation: reward shaping, and which samples of a group train at all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Groups, SampleBatch
from grpo_megatron.algorithms.running_distribution import RunningDistribution
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


def adaptive(
    o: ObjectiveConfig, batch: SampleBatch, groups: Groups, seen: Sequence[RunningDistribution]
) -> Tensor:
    """GFPO, adaptive difficulty: the shortest k samples, by running quartiles of groups' mean
    rewards: the easiest quarter keeps 1/2 of `subset_size`, the next 3/4, the harder half all.
    seen: by scope, mean rewards of all groups of the run up to these (`success`). bool [N]"""
    mean_reward = groups.mean(batch.rewards)
    scope_of_sample = batch.scopes(o.statistics_scope)
    size = torch.empty_like(mean_reward)
    for scope, distribution in enumerate(seen):
        easy = distribution.quantile(0.75)
        medium = distribution.quantile(0.5)
        share = torch.ones_like(mean_reward)
        share[mean_reward > medium] = 0.75
        share[mean_reward > easy] = 0.5
        size = torch.where(scope_of_sample == scope, (share * o.subset_size).ceil(), size)
    return groups.valid & (_by_length(batch, groups) < size)


def success(
    o: ObjectiveConfig, batch: SampleBatch, groups: Groups, num_scopes: int
) -> list[Tensor]:
    """Mean rewards of the groups of each scope, float64 [groups of the scope]."""
    is_first = groups.valid & (groups.rank(batch.sample_ids.double(), batch.sample_ids) == 0)
    mean_reward = groups.mean(batch.rewards)
    scope_of_sample = batch.scopes(o.statistics_scope)
    return [mean_reward[is_first & (scope_of_sample == scope)] for scope in range(num_scopes)]


REWARD_SHAPINGS = {f.__name__: f for f in (length_switch, per_token)}
GROUP_SUBSETS = {f.__name__: f for f in (shortest, token_efficiency)}
"""Decided by the group alone; `adaptive` also takes what earlier groups earned."""


def _by_length(batch: SampleBatch, groups: Groups) -> Tensor:
    return groups.rank(batch.token_counts.double(), batch.sample_ids)
