"""From per-token losses to one number: a fixed weight for every token of a sample.

Weights hold the global denominators. They follow from the lengths of the samples of the whole
optimizer step, known before its first micro-batch, so splitting the step differently changes
nothing. Shape legend: N trained samples."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.config.objective import ObjectiveConfig


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
        weights = AGGREGATIONS[o.aggregation](o, part)
        found[:, rows] = weights if o.aggregation == "lambda_grpo" else (weights, 0 * weights)
    return found


def seq_mean_token_mean(o: ObjectiveConfig, lengths: Lengths) -> np.ndarray:
    """`1 / (N_seq T_i)` (GRPO, GSPO, SAPO); long answers pay less per token."""
    return 1.0 / (max(len(lengths.tokens), 1) * np.maximum(lengths.tokens, 1).astype(np.float64))


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
    return 1.0 / (max(len(tokens), 1) * np.maximum(tokens, 1.0))[group]


def lambda_grpo(o: ObjectiveConfig, lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    """`f_i / N_tok`, `f_i = G softmax_i(h_i^lambda)` in the group, `h = 1 + rho z`, z the
    length's z-score; lambda is learned, 0 is token_mean (λ-GRPO, arXiv:2510.06870)."""
    _, group = np.unique(lengths.groups, return_inverse=True)
    count = np.bincount(group).astype(float)
    tokens = lengths.tokens.astype(float)

    def mean(values: np.ndarray) -> np.ndarray:
        return (np.bincount(group, values) / count)[group]

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


AGGREGATIONS = {f.__name__: f for f in (
    seq_mean_token_mean, token_mean, seq_mean_token_sum, constant, prompt_mean, lambda_grpo)}
