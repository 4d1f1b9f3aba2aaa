"""What is fixed before the first micro-batch of an optimizer step; first of all the weight of every
token, by which per-token losses become one number.

Weights hold the global denominators. They follow from the lengths of the samples of the whole
optimizer step, so splitting the step differently changes nothing. N: trained samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.estimators import turn_index
from grpo_megatron.algorithms.advantages.pipeline import Advantages
from grpo_megatron.algorithms.batch import LossBatch, SampleBatch
from grpo_megatron.algorithms.custom import function_of, require_shape
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.terms import preference_coefficients
from grpo_megatron.config.objective import ObjectiveConfig


@dataclass(frozen=True)
class StepTerms:
    """Per-sample (or per-token) constants of the loss, in the order of the batch."""

    batch: SampleBatch
    advantages: Advantages
    weights: Tensor  # float64 [N]; 0 for samples that are not trained
    slopes: Tensor | None  # float64 [N]
    turns: Tensor | None  # int32 [n]
    preference: Tensor | None = None  # float64 [2, N]

    def loss_batch(
        self,
        rows: Tensor,
        logprobs: Tensor,
        old: Tensor,
        rollout: Tensor,
        entropies: Tensor,
        ref: Tensor | None = None,
        untruncated: Tensor | None = None,
        decisions: Mapping[str, Tensor] | None = None,
    ) -> LossBatch:
        """The loss's view of the samples `rows` (int64 [S]) and of their tokens ([n]); `decisions`,
        of the whole batch, are to be followed (bool by name)."""
        device = logprobs.device
        counts = self.batch.token_counts[rows]
        per_token = self.advantages.per_token
        values = self.advantages.values
        index = self.batch.flat_index(rows)

        def spread(values: Tensor) -> Tensor:
            return values[rows].to(logprobs).repeat_interleave(counts.to(device))

        turn = (
            None
            if self.turns is None
            else torch.unique_consecutive(self.turns[index], return_inverse=True)[1].to(device)
        )
        preference = None if self.preference is None else self.preference[:, rows].to(logprobs)
        if decisions is not None:
            decisions = {name: flags[index].to(device) for name, flags in decisions.items()}
        return LossBatch(
            logprobs,
            old,
            rollout,
            entropies,
            advantages=values[index].to(logprobs) if per_token else spread(values),
            weights=spread(self.weights),
            token_counts=counts.to(device),
            ref_logprobs=ref,
            sample=torch.arange(len(rows)).repeat_interleave(counts).to(device),
            turn=turn,
            domain=self.batch.domains[rows].to(device),
            preference=preference,
            decisions=decisions,
            untruncated_logprobs=logprobs if untruncated is None else untruncated,
            weight_slopes=None if self.slopes is None else spread(self.slopes),
        )

    def with_margins(self, objective: Objective, margins: Tensor) -> StepTerms:
        """Fix the preference loss of this step at the current weights. margins: float64 [N]."""
        batch = replace(self.batch, trained=self.weights > 0)
        parts = preference_coefficients(objective.config, batch, batch.rewards, margins)
        return replace(self, preference=torch.stack(parts))


def step_terms(
    objective: Objective,
    batch: SampleBatch,
    advantages: Advantages,
    rows: Tensor,
    constant_length: int,
) -> StepTerms:
    """Weights of one optimizer step. `advantages` are of the whole rollout batch; `rows` (int64)
    are the samples of this step, which the denominators count; `constant_length` tokens are what
    `aggregation = "constant"` divides by."""
    o = objective.config
    found = np.zeros((2, len(batch)))
    lengths = Lengths(
        batch.token_counts[rows].numpy(),
        batch.group_ids[rows].numpy(),
        constant_length,
        objective.exponent,
    )
    found[:, rows.numpy()] = token_weights(o, lengths, batch.domains[rows].numpy())
    weights, slopes = torch.from_numpy(found)
    return StepTerms(
        batch,
        advantages,
        weights,
        slopes if o.aggregation == "lambda_grpo" else None,
        turn_index(batch) if o.ratio == "turn_geo" else None,
    )


@dataclass(frozen=True)
class Lengths:
    tokens: np.ndarray  # int64 [N], policy tokens
    groups: np.ndarray  # int64 [N]
    constant: int  # fixed length of `constant`
    exponent: float = 0.0  # of `lambda_grpo`


def token_weights(o: ObjectiveConfig, lengths: Lengths, domains: np.ndarray) -> np.ndarray:
    """Weight of every token of each sample, and its slope by lambda_grpo's exponent: [2, N].

    With `denominator = "domain"` every domain (int64 [N]) counts for itself, the losses add up."""
    found = np.zeros((2, len(domains)))
    scopes = domains if o.denominator == "domain" else np.zeros_like(domains)
    for scope in np.unique(scopes):
        rows = scopes == scope
        part = replace(lengths, tokens=lengths.tokens[rows], groups=lengths.groups[rows])
        weights = function_of("aggregation", o.aggregation, AGGREGATIONS)(o, part)
        if o.aggregation == "lambda_grpo":
            found[:, rows] = weights
        else:
            require_shape(o.aggregation, np.shape(weights), part.tokens.shape)
            found[0, rows] = weights
    return found


def seq_mean_token_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq T_i)` (GRPO, GSPO, SAPO); long answers pay less per token."""
    num_samples = max(len(lengths.tokens), 1)
    tokens = np.maximum(lengths.tokens, 1).astype(np.float64)
    weights: np.ndarray = 1.0 / (num_samples * tokens)
    return weights


def token_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / N_tok` (DAPO, arXiv:2503.14476); long samples weigh more."""
    return np.full(len(lengths.tokens), 1.0 / max(int(lengths.tokens.sum()), 1))


def seq_mean_token_sum(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / N_seq`: the unnormalised sequence gradient."""
    return np.full(len(lengths.tokens), 1.0 / max(len(lengths.tokens), 1))


def constant(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq L)`, L fixed for the whole run (Dr. GRPO, arXiv:2503.20783)."""
    return seq_mean_token_sum(o, lengths) / lengths.constant


def prompt_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (Q N_tok of the group)`: the mean over prompts of their token mean."""
    _, group = np.unique(lengths.groups, return_inverse=True)
    tokens = np.bincount(group, lengths.tokens)
    num_groups = max(len(tokens), 1)
    of_group: np.ndarray = 1.0 / (num_groups * np.maximum(tokens, 1.0))
    return of_group[group]


def lambda_grpo(o: ObjectiveConfig, lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    """`f_i / N_tok`, `f_i = G softmax_i(h_i^lambda)` in the group, `h = 1 + rho z`, z the
    length's z-score; lambda is learned, 0 is token_mean (λ-GRPO, arXiv:2510.06870)."""
    _, group = np.unique(lengths.groups, return_inverse=True)
    count = np.bincount(group).astype(float)
    tokens = lengths.tokens.astype(float)

    def mean(values: np.ndarray) -> np.ndarray:
        of_group: np.ndarray = np.bincount(group, values) / count
        return of_group[group]

    centred = tokens - mean(tokens)
    std = np.sqrt(mean(centred**2))
    base = np.maximum(1 + o.lambda_rho * centred / np.where(std > 0, std, 1.0), 1e-3)
    power = base**lengths.exponent
    weight = np.exp(power - power.max(initial=0.0))
    share = weight / mean(weight)  # G times the softmax
    slope = power * np.log(base)
    slope = share * (slope - mean(share * slope))
    total = max(int(lengths.tokens.sum()), 1)
    return share / total, slope / total


AGGREGATIONS = {
    f.__name__: f
    for f in (
        seq_mean_token_mean,
        token_mean,
        seq_mean_token_sum,
        constant,
        prompt_mean,
        lambda_grpo,
    )
}
