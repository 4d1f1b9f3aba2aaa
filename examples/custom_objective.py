"""An advantage, a clip and an aggregation of one's own, see `grpo_megatron/algorithms/custom.py`.

    objective.advantage = "custom_objective:above_median"
    objective.clip = "custom_objective:tanh_clip"
    objective.aggregation = "custom_objective:root_length"

Each must give the same numbers on every rank and for every split into micro-batches."""

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.aggregation import Lengths
from grpo_megatron.algorithms.batch import ClipInputs, SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig


def above_median(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i - median of the group`: one outlier does not move the baseline. float64 [N]

    Samples without a reward are not counted (`groups.valid`) and get 0."""
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group_ids.unique():
        members = groups.valid & (batch.group_ids == group)
        rewards = batch.rewards[members]
        if len(rewards):
            advantages[members] = rewards - torch.quantile(rewards, 0.5)
    return advantages


def tanh_clip(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`h tanh((r - 1) / h) A`, h the clip distance: the gradient of `r A` on policy, which fades
    smoothly instead of being cut. [n], to be maximised.

    The gradient flows through `inputs.log_ratio`."""
    ratio = inputs.log_ratio.exp()
    return inputs.high * torch.tanh((ratio - 1) / inputs.high) * inputs.advantages


def root_length(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq sqrt(T_i))`: between the sequence's mean and its sum. float64 [N], per token."""
    num_samples = max(len(lengths.tokens), 1)
    return 1.0 / (num_samples * np.sqrt(np.maximum(lengths.tokens, 1)))
