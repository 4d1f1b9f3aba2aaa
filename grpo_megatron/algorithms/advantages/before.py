"""What happens before estimation: reward shaping, and which samples of a group train at all."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.algorithms.running_distribution import RunningDistribution
from grpo_megatron.config.objective import ObjectiveConfig

REWARD_SHAPINGS: Registry[Callable[[ObjectiveConfig, SampleBatch, Groups], Tensor]] = Registry()
"""`(objective, batch, groups) -> float64 [N]`, the rewards that estimators see."""
GROUP_SUBSETS: Registry[Callable[[ObjectiveConfig, SampleBatch, Groups], Tensor]] = Registry()
"""`(objective, batch, groups) -> bool [N]`, the samples that train: decided by the group alone.
`adaptive_subset` also takes what earlier groups earned."""


@REWARD_SHAPINGS.register("length_switch")
def length_switch(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GRPO-λ (arXiv:2505.18086): in the `length_switch_fraction` of groups with the highest
    success (at least one right), right samples earn `1 - weight sigmoid(z)`, z their length's
    z-score among the group's right samples; everywhere else rewards are plain 0 and 1. [N]"""
    right = groups.valid & batch.is_correct(o.correct_threshold)
    pays_for_length = _is_leading(o, batch, groups, groups.mean(right.double()))
    lengths = batch.token_counts.double()
    of_right = Groups(groups.ids, right)
    deviation = of_right.std(lengths, "population") + o.advantage_eps
    z = (lengths - of_right.mean(lengths)) / deviation
    z = torch.where(of_right.spread(lengths) > 0, z, 0.0)
    by_length = 1 - o.length_switch_weight * torch.sigmoid(z)
    earned = torch.where(pays_for_length, by_length, 1.0)
    shaped = torch.where(right, earned, 0.0)
    return torch.where(torch.isnan(batch.rewards), torch.nan, shaped)


def _is_leading(o: ObjectiveConfig, batch: SampleBatch, groups: Groups, success: Tensor) -> Tensor:
    """Return samples of the groups with the highest success of their scope, bool [N]. success:
    [N]"""
    # one sample stands for each group: the first
    first = groups.rank(batch.sample_ids.double(), batch.sample_ids) == 0
    leaders = Groups(batch.scopes(o.statistics_scope), first & (groups.count > 0))
    leader_id = groups.min(batch.sample_ids.double()).nan_to_num(posinf=0).long()
    place = leaders.rank(-success, leader_id)
    num_leading = torch.floor(o.length_switch_fraction * leaders.count + 1e-9)
    is_leading = place < num_leading
    of_group = torch.zeros(groups.size, dtype=torch.bool)
    of_group[groups.ids[first]] = is_leading[first]
    return of_group[groups.ids]


@REWARD_SHAPINGS.register("per_token")
def reward_per_token(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`R_i / T_i` (an option of TIC-GRPO, arXiv:2508.02833); rewards brevity strongly. [N]"""
    return batch.rewards / batch.token_counts.clamp(min=1)


@GROUP_SUBSETS.register("shortest")
def shortest_samples(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GFPO (arXiv:2508.09726): the `subset_size` shortest samples. bool [N]"""
    return groups.valid & (_length_rank(batch, groups) < o.subset_size)


@GROUP_SUBSETS.register("token_efficiency")
def most_efficient_samples(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GFPO: the `subset_size` samples with the highest reward per token. bool [N]"""
    efficiency = batch.rewards / batch.token_counts.clamp(min=1)
    return groups.valid & (groups.rank(-efficiency, batch.sample_ids) < o.subset_size)


def adaptive_subset(
    o: ObjectiveConfig, batch: SampleBatch, groups: Groups, seen: Sequence[RunningDistribution]
) -> Tensor:
    """GFPO, adaptive difficulty: the shortest k samples, by running quartiles of groups' mean
    rewards: the easiest quarter keeps 1/2 of `subset_size`, the next 3/4, the harder half all.
    seen: by scope, mean rewards of all groups of the run up to these (`mean_rewards`). bool [N]"""
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
    return groups.valid & (_length_rank(batch, groups) < size)


def mean_rewards(
    o: ObjectiveConfig, batch: SampleBatch, groups: Groups, num_scopes: int
) -> list[Tensor]:
    """Return mean rewards of the groups of each scope, float64 [groups of the scope]."""
    is_first = groups.valid & (groups.rank(batch.sample_ids.double(), batch.sample_ids) == 0)
    mean_reward = groups.mean(batch.rewards)
    scope_of_sample = batch.scopes(o.statistics_scope)
    return [mean_reward[is_first & (scope_of_sample == scope)] for scope in range(num_scopes)]


def _length_rank(batch: SampleBatch, groups: Groups) -> Tensor:
    """Place of each sample by length within its group, int64 [N]; the shortest has 0."""
    return groups.rank(batch.token_counts.double(), batch.sample_ids)
