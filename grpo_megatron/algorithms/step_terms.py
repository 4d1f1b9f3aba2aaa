"""What is fixed for every sample before the first micro-batch of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.pipeline import Advantages, compute_advantages
from grpo_megatron.algorithms.advantages.steps import turn_index
from grpo_megatron.algorithms.aggregation import Lengths, token_weights
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.objective import LossBatch, Objective
from grpo_megatron.algorithms.regularisers import preference_coefficients


@dataclass(frozen=True)
class StepTerms:
    """Per-sample (or per-token) constants of the loss, in the order of the batch."""

    batch: SampleBatch
    advantages: Advantages
    weights: Tensor  # float64 [N]; 0 for samples that are not trained
    slopes: Tensor | None  # float64 [N]
    turns: Tensor | None  # int32 [n]
    preference: Tensor | None = None  # float64 [2, N]

    def loss_batch(self, rows: Tensor, logprobs: Tensor, old: Tensor, rollout: Tensor,
                   entropies: Tensor, ref: Tensor | None = None,
                   untruncated: Tensor | None = None,
                   decisions: Mapping[str, Tensor] | None = None) -> LossBatch:
        """The loss's view of the samples `rows` (int64 [S]) and of their tokens ([n]); `decisions`,
        of the whole batch, are to be followed (bool by name)."""
        device, counts = logprobs.device, self.batch.token_counts[rows]
        per_token, values = self.advantages.per_token, self.advantages.values
        index = self.batch.flat_index(rows)

        def spread(values: Tensor) -> Tensor:
            return values[rows].to(logprobs).repeat_interleave(counts.to(device))

        turn = None
        if self.turns is not None:
            turn = torch.unique_consecutive(self.turns[index], return_inverse=True)[1].to(device)
        preference = None if self.preference is None else self.preference[:, rows].to(logprobs)
        if decisions is not None:
            decisions = {name: flags[index].to(device) for name, flags in decisions.items()}
        return LossBatch(
            logprobs, old, rollout, entropies,
            advantages=values[index].to(logprobs) if per_token else spread(values),
            weights=spread(self.weights),
            sample=torch.arange(len(rows)).repeat_interleave(counts).to(device),
            token_counts=counts.to(device), domain=self.batch.domains[rows].to(device),
            untruncated_logprobs=logprobs if untruncated is None else untruncated,
            ref_logprobs=ref, turn=turn, preference=preference, decisions=decisions,
            weight_slopes=None if self.slopes is None else spread(self.slopes))

    def with_margins(self, objective: Objective, margins: Tensor) -> StepTerms:
        """Fix the preference loss of this step at the current weights. margins: float64 [N]."""
        batch = replace(self.batch, trained=self.weights > 0)
        parts = preference_coefficients(objective.config, batch, batch.rewards, margins)
        return replace(self, preference=torch.stack(parts))


def step_terms(objective: Objective, batch: SampleBatch, advantages: Advantages,
               rows: Tensor, constant_length: int) -> StepTerms:
    """Weights of one optimizer step. `advantages` are of the whole rollout batch; `rows` (int64)
    are the samples of this step, which the denominators count; `constant_length` tokens are what
    `aggregation = "constant"` divides by."""
    o, found = objective.config, np.zeros((2, len(batch)))
    lengths = Lengths(batch.token_counts[rows].numpy(), batch.group_ids[rows].numpy(),
                      constant_length, objective.exponent)
    found[:, rows.numpy()] = token_weights(o, lengths, batch.domains[rows].numpy())
    weights, slopes = torch.from_numpy(found)
    return StepTerms(batch, advantages, weights, slopes if o.aggregation == "lambda_grpo" else None,
                     turn_index(batch) if o.ratio == "turn_geo" else None)


def advantages_of(objective: Objective, batch: SampleBatch) -> Advantages:
    """Advantages of the batch, with the KL weights of the domains."""
    betas = None
    if objective.config.kl == "reward_k1":
        by_domain = torch.tensor(objective.by_domain("kl_beta"), dtype=torch.float64)
        betas = by_domain[batch.domains]
    return compute_advantages(objective.config, batch, betas)
