"""Rewards to advantages, in the order: shaping, subset, estimator, KL, whitening, reweighting,
clip."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.after import SHAPINGS, whiten
from grpo_megatron.algorithms.advantages.before import (
    GROUP_SUBSETS,
    REWARD_SHAPINGS,
    adaptive_subset,
    mean_rewards,
)
from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS
from grpo_megatron.algorithms.batch import Advantages, SampleBatch, ValueTargets
from grpo_megatron.algorithms.custom import columns_of, is_custom, require_shape, result_of
from grpo_megatron.algorithms.groups import Groups, by_groups, suffix_sums
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.running_distribution import RunningDistribution
from grpo_megatron.config.objective import TOKEN_LEVEL, TOKEN_SHAPINGS, ObjectiveConfig
from grpo_megatron.config.passes import advantage_columns


def needed_columns(o: ObjectiveConfig, *, weighs_kl: bool) -> frozenset[str]:
    """Return the names of the token columns from which advantages are computed. weighs_kl: see
    `Objective`."""
    return advantage_columns(o, weighs_kl=weighs_kl) | set(columns_of(o.advantage))


def select(objective: Objective, batch: SampleBatch) -> Tensor:
    """Return which samples are in the loss and in its denominators, bool [N]: the subset that is
    trained."""
    if objective.config.subset == "none":
        return batch.trained
    _, groups = _rewarded(objective, batch)
    return batch.trained & groups.valid


def state_after(objective: Objective, batch: SampleBatch) -> dict[str, Any]:
    """Return `objective.state` once the batch is trained: with its groups, where later subsets are
    measured against them."""
    state = dict(objective.state)
    if objective.config.subset == "adaptive":
        shaped, groups = _shaped(objective.config, batch)
        for key, distribution in _success_so_far(objective, shaped, groups).items():
            state[key] = distribution.state
    return state


def advantages_of(objective: Objective, batch: SampleBatch) -> Advantages:
    """Compute the advantages of a whole rollout batch, without gradient, by the steps of this
    module; 0 for samples without a reward or outside of the subset.

    Raises DataError: steps or turns are missing; ConfigError: a custom function cannot be imported
    or called, or returns another shape than [N]."""
    o = objective.config
    batch, groups = _rewarded(objective, batch)
    puts_kl_into_rewards = o.kl == "reward_k1" and objective.weighs_kl
    if o.advantage == "gae" and puts_kl_into_rewards:
        batch = _with_kl_rewards(objective, batch)
    values = result_of("advantage", o.advantage, ESTIMATORS, o, batch, groups)
    per_token = o.advantage in TOKEN_LEVEL
    if is_custom(o.advantage):
        require_shape("advantage", o.advantage, values, (len(batch),))
    if o.advantage != "gae" and puts_kl_into_rewards:
        future = _future_kl(batch, _kl_weights(objective, batch))
        if not per_token:
            values = batch.to_tokens(values.to(future.dtype))
            per_token = True
        values = values - future
    if o.whiten != "none":
        counted = groups.valid
        if o.advantage == "gae":  # of samples that are not trained there may be no values
            counted = counted & batch.trained
        values = whiten(o, batch, values, counted, per_token=per_token)
    if o.shaping != "none":
        values = SHAPINGS[o.shaping](o, batch, groups, values)
        per_token = o.shaping in TOKEN_SHAPINGS
    if o.advantage_clip is not None:
        values = values.clamp(-o.advantage_clip, o.advantage_clip)
    valid = groups.valid
    if per_token:
        valid = batch.to_tokens(valid)
    return Advantages(torch.where(valid, values, 0.0), per_token)


def value_targets(objective: Objective, batch: SampleBatch) -> ValueTargets:
    """Return what a critic learns from a whole rollout batch, whose column `values` is the critic's
    own from before the step: returns are GAE before any whitening, added to these values."""
    o = objective.config
    batch, groups = _rewarded(objective, batch)
    if o.kl == "reward_k1" and objective.weighs_kl:
        batch = _with_kl_rewards(objective, batch)
    values = batch.tokens["values"].double()
    is_counted = batch.to_tokens(groups.valid & batch.trained)
    if batch.spoilt is not None:
        is_counted = is_counted & ~batch.spoilt
    returns = ESTIMATORS["gae"](o, batch, groups).double() + values
    return ValueTargets(values, torch.where(is_counted, returns, 0.0), is_counted)


def _rewarded(objective: Objective, batch: SampleBatch) -> tuple[SampleBatch, Groups]:
    """Return the batch with shaped rewards, and its groups with the samples that count."""
    o = objective.config
    batch, groups = _shaped(o, batch)
    if o.subset == "none":
        return batch, groups
    if o.subset == "adaptive":
        seen = _success_so_far(objective, batch, groups)
        chosen = adaptive_subset(o, batch, groups, list(seen.values()))
    else:
        chosen = GROUP_SUBSETS[o.subset](o, batch, groups)
    return batch, Groups(batch.group_ids, chosen)


def _shaped(o: ObjectiveConfig, batch: SampleBatch) -> tuple[SampleBatch, Groups]:
    """Return the batch with shaped rewards, and its groups with all samples that have one. Which
    samples are correct stays as it was by the rewards before."""
    groups = Groups(batch.group_ids, batch.valid)
    if o.reward_shaping == "none":
        return batch, groups
    rewards = REWARD_SHAPINGS[o.reward_shaping](o, batch, groups)
    is_correct = batch.is_correct(o.correct_threshold)
    return replace(batch, rewards=rewards, correct=is_correct), groups


def _success_so_far(
    objective: Objective, batch: SampleBatch, groups: Groups
) -> Mapping[str, RunningDistribution]:
    """Return the mean rewards of groups up to these, by the key of each scope in
    `Objective.state`."""
    keys = ["success"]
    if objective.config.statistics_scope == "domain":
        keys = [f"success@{domain}" for domain in objective.domains]
    found = {}
    of_scopes = mean_rewards(objective.config, batch, groups, len(keys))
    for key, of_groups in zip(keys, of_scopes, strict=True):
        earlier = RunningDistribution.from_state(objective.state.get(key, []))
        found[key] = earlier.with_values(of_groups.numpy())
    return found


def _kl_weights(objective: Objective, batch: SampleBatch) -> Tensor:
    """Return the weight of a KL in the reward, float64 [N]."""
    by_domain = torch.tensor(objective.by_domain("kl_beta"), dtype=torch.float64)
    return by_domain[batch.domains]


def _future_kl(batch: SampleBatch, betas: Tensor) -> Tensor:
    """KL in the reward: `beta sum_{u >= t} (log pi_old - log pi_ref)_u` (arXiv:2501.03262). [n]"""

    def of_groups(part: SampleBatch, beta: Tensor) -> Tensor:
        return part.to_tokens(beta) * suffix_sums(_k1(part), part)

    return by_groups(batch, of_groups, betas)


def _with_kl_rewards(objective: Objective, batch: SampleBatch) -> SampleBatch:
    """Return the batch whose tokens earn `-beta (log pi_old - log pi_ref)` each
    (arXiv:2203.02155)."""
    betas = batch.to_tokens(_kl_weights(objective, batch))
    return replace(batch, tokens={**batch.tokens, "token_rewards": -betas * _k1(batch)})


def _k1(batch: SampleBatch) -> Tensor:
    """`log pi_old - log pi_ref` of each token, [n]; 0 where one of them is infinite."""
    k1 = batch.tokens["old_logprobs"] - batch.tokens["ref_logprobs"]
    return torch.where(torch.isfinite(k1), k1, 0.0)
