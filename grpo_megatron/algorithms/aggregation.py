"""The weight of every token, by which per-token losses become one number.

Weights hold the global denominators. They follow from the lengths of the samples of the whole
optimizer step, so splitting the step differently changes nothing. N: trained samples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.estimators import turn_index
from grpo_megatron.algorithms.batch import Advantages, LossConstants, SampleBatch
from grpo_megatron.algorithms.custom import require_shape, result_of
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.algorithms.terms import preference_coefficients
from grpo_megatron.algorithms.token_selection import (
    covariant_tokens,
    low_entropy_tokens,
    outlying_tokens,
)
from grpo_megatron.config.objective import ObjectiveConfig


@dataclass(frozen=True)
class Lengths:
    """From what the weights of one optimizer step (or of a domain's part of it) are computed."""

    tokens: np.ndarray  # int64 [N], policy tokens
    groups: np.ndarray  # int64 [N]
    constant: int  # fixed length of `constant`
    exponent: float = 0.0  # of `lambda_grpo`


AGGREGATIONS: Registry[Callable[[ObjectiveConfig, Lengths], Any]] = Registry()
"""`(objective, lengths) -> float64 [N]`, the weight of each token of a sample; `lambda_grpo` gives
its slopes too."""


def loss_constants(
    objective: Objective,
    batch: SampleBatch,
    advantages: Advantages,
    rows: Tensor,
    constant_length: int,
) -> LossConstants:
    """Fix what does not change during one optimizer step, above all its weights.

    advantages: of the whole rollout batch; rows: int64, the samples of this step, which the
    denominators count; constant_length: tokens by which `aggregation = "constant"` divides."""
    o = objective.config
    lengths = Lengths(
        batch.token_counts[rows].numpy(),
        batch.group_ids[rows].numpy(),
        constant_length,
        objective.exponent,
    )
    of_batch = np.zeros((2, len(batch)))
    of_batch[:, rows.numpy()] = token_weights(o, lengths, batch.domains[rows].numpy())
    weights, slopes = torch.from_numpy(of_batch)
    weight_slopes = None
    if o.aggregation == "lambda_grpo":
        weight_slopes = slopes
    turns = None
    if o.ratio == "turn_geo":
        turns = turn_index(batch)
    positive_weights = None
    if o.positive_nll_weight > 0:
        positive_weights = positive_token_weights(o, batch, rows)
    low_entropy = None
    if o.top_entropy_share < 1:
        low_entropy = low_entropy_tokens(o, batch, rows)
    covariant = None
    if o.clip in ("clip_cov", "kl_cov"):
        covariant = covariant_tokens(o, batch, advantages, rows)
    outlying = None
    if o.off_policy_mask == "m2po":
        outlying = outlying_tokens(o, batch, advantages, rows)
    return LossConstants(
        batch=batch,
        advantages=advantages,
        weights=weights,
        weight_slopes=weight_slopes,
        turns=turns,
        positive_weights=positive_weights,
        low_entropy=low_entropy,
        covariant=covariant,
        outlying=outlying,
        router_shift=batch.tokens.get("router_shift"),
    )


def with_preference(
    constants: LossConstants, objective: Objective, margins: Tensor
) -> LossConstants:
    """Fix the preference loss of this step, too, at the current weights.

    margins: float64 [N], `sum_t log pi_theta - log pi_ref` of every sample, over the tokens that
    are in the loss (`ratios.infinite_tokens`)."""
    batch = replace(constants.batch, trained=constants.weights > 0)
    parts = preference_coefficients(objective.config, batch, batch.rewards, margins)
    return replace(constants, preference=torch.stack(parts))


def positive_token_weights(o: ObjectiveConfig, batch: SampleBatch, rows: Tensor) -> Tensor:
    """Return the weight of the negative log-likelihood at every token of each sample, float64 [N]:
    `positive_nll_weight` over the tokens of all correct samples among `rows` (int64), of the domain
    with `denominator = "domain"`; 0 for the others (VAPO, arXiv:2504.05118 eq. 10)."""
    in_step = torch.zeros(len(batch), dtype=torch.bool)
    in_step[rows] = True
    is_positive = in_step & batch.valid & batch.is_correct(o.correct_threshold)
    scopes = Groups(batch.scopes(o.denominator), is_positive)
    num_tokens = scopes.sum(batch.token_counts.double())
    return torch.where(is_positive, o.positive_nll_weight / num_tokens.clamp(min=1), 0.0)


def token_weights(o: ObjectiveConfig, lengths: Lengths, domains: np.ndarray) -> np.ndarray:
    """Return the weight of every token of each sample, and its slope by lambda_grpo's exponent: [2,
    N].

    With `denominator = "domain"` every domain (int64 [N]) counts for itself, and the losses add up.
    Raises ConfigError where a custom aggregation cannot be called, or returns another shape than
    [N]."""
    found = np.zeros((2, len(domains)))
    scopes = np.zeros_like(domains)
    if o.denominator == "domain":
        scopes = domains
    for scope in np.unique(scopes):
        rows = scopes == scope
        part = replace(lengths, tokens=lengths.tokens[rows], groups=lengths.groups[rows])
        weights = result_of("aggregation", o.aggregation, AGGREGATIONS, o, part)
        if o.aggregation == "lambda_grpo":
            found[:, rows] = weights
        else:
            weights = np.asarray(weights)
            require_shape("aggregation", o.aggregation, weights, part.tokens.shape)
            found[0, rows] = weights
    return found


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq T_i)` (GRPO, GSPO, SAPO); long answers pay less per token."""
    num_samples = max(len(lengths.tokens), 1)
    tokens = np.maximum(lengths.tokens, 1).astype(np.float64)
    weights: np.ndarray = 1.0 / (num_samples * tokens)
    return weights


@AGGREGATIONS.register("token_mean")
def token_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / N_tok` (DAPO, arXiv:2503.14476); long samples weigh more."""
    return np.full(len(lengths.tokens), 1.0 / max(int(lengths.tokens.sum()), 1))


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / N_seq`: the unnormalised sequence gradient."""
    return np.full(len(lengths.tokens), 1.0 / max(len(lengths.tokens), 1))


@AGGREGATIONS.register("constant")
def constant_length(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq L)`, L fixed for the whole run (Dr. GRPO, arXiv:2503.20783)."""
    num_samples = max(len(lengths.tokens), 1)
    return np.full(len(lengths.tokens), 1.0 / num_samples / lengths.constant)


@AGGREGATIONS.register("prompt_mean")
def prompt_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (Q N_tok of the group)`: the mean over prompts of their token mean."""
    _, group = np.unique(lengths.groups, return_inverse=True)
    tokens = np.bincount(group, lengths.tokens)
    num_groups = max(len(tokens), 1)
    of_group: np.ndarray = 1.0 / (num_groups * np.maximum(tokens, 1.0))
    return of_group[group]


@AGGREGATIONS.register("lambda_grpo")
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
