"""Whether a group can teach an objective anything, which decides what `zero_variance` drops."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.before import GROUP_SUBSETS, REWARD_SHAPINGS
from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS, steps_of
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.custom import is_custom
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig

_BASELINE_FROM_ELSEWHERE = ("reward", "batch", "gae")
"""Advantages that no group can rule out: they are measured against other groups, or a critic."""
_READ_TOKENS = ("gtpo_entropy", "grpo_s")
"""Advantages that differ by token entropies also where all rewards of a group are equal."""
SUM_TO_ZERO = ("group", "rloo", "maxrl", "components", "passk", "pkpo")
"""Advantages whose sum is 0 in every group (pkpo's with its baseline), hence their mean over the
batch too: whitening by samples leaves a group without any as it is."""


def carries_signal(o: ObjectiveConfig, group: SampleBatch) -> bool:
    """Say whether the advantages of a group may differ from 0.

    o: as its domain has it; group: without token columns. Raises DataError for `gagpo` and `gigpo`
    without turns.

    The objective's own estimator decides, not the spread of the summed rewards: components, step
    rewards and lengths may differ where sums agree, and the other way round. What only the whole
    batch or the trainer knows counts as a signal."""
    if not group.valid.any():
        return False
    is_correct = group.is_correct(o.correct_threshold)
    if o.advantage in _BASELINE_FROM_ELSEWHERE or o.advantage in _READ_TOKENS:
        return True
    if is_custom(o.advantage):
        return True
    if o.positive_nll_weight > 0 and bool((group.valid & is_correct).any()):
        return True
    if o.kl == "reward_k1" and o.kl_beta > 0:
        return True
    if _is_moved_by_whitening(o):
        return True
    if o.advantage == "process" and steps_of(group) is None:
        return False
    if o.advantage in ("otb", "opob"):
        group = _with_some_tokens(group)
    estimator = ESTIMATORS[o.advantage]
    for rewards in _possible_rewards(o, group):
        shaped = replace(group, rewards=rewards, correct=is_correct)
        groups = Groups(group.group_ids, group.valid)
        if o.subset in GROUP_SUBSETS:  # the size of adaptive's is decided by other groups
            groups = Groups(group.group_ids, GROUP_SUBSETS[o.subset](o, shaped, groups))
        if bool((estimator(o, shaped, groups) != 0).any()):
            return True
    return False


def _is_moved_by_whitening(o: ObjectiveConfig) -> bool:
    """Whether the batch's mean, which whitening takes off, may differ from 0: then nobody's
    advantage is sure to be 0."""
    if o.whiten == "none":
        return False
    if o.whiten == "tokens" or o.advantage not in SUM_TO_ZERO:
        return True
    has_kl_of_other_domains = o.kl == "reward_k1" and o.statistics_scope == "global"
    has_no_baseline = o.advantage == "pkpo" and not o.pkpo_baseline
    return has_kl_of_other_domains or has_no_baseline


def _with_some_tokens(group: SampleBatch) -> SampleBatch:
    """Return the group with token columns of a fair coin: whether all advantages of `otb` or `opob`
    are 0 depends on rewards and lengths, not on them."""
    half = torch.full((group.num_tokens,), 0.5, dtype=torch.float64)
    columns = {
        "old_logprobs": half.log(),
        "rollout_logprobs": half.log(),
        "sampled_logprobs": half.log(),
        "squared_probs": half,
    }
    return replace(group, tokens=columns)


def _possible_rewards(o: ObjectiveConfig, group: SampleBatch) -> list[Tensor]:
    """Return the rewards after shaping, float64 [G]: both, where the rest of the batch decides."""
    groups = Groups(group.group_ids, group.valid)
    if o.reward_shaping == "none":
        return [group.rewards]
    shape = REWARD_SHAPINGS[o.reward_shaping]
    if o.reward_shaping != "length_switch":
        return [shape(o, group, groups)]
    possible = []
    for fraction in (0.0, 1.0):  # not, or among the groups that pay for length
        with_fraction = o.model_copy(update={"length_switch_fraction": fraction})
        possible.append(shape(with_fraction, group, groups))
    return possible
