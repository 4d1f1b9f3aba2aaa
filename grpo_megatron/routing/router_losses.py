"""Probabilities of a router, and losses that hold it in place. Pure functions.

Shape legend: n tokens, E experts, K experts per token. `scores` [n, E] are what the router chooses
the largest of: logits, softmax probabilities, or sigmoid scores plus the selection bias."""

import torch
from torch import Tensor

_TINY = 1e-20


def log_probs(scores: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """Log-probabilities of the experts, at least fp32 [n, E]; sigmoid scores are normalised.

    kind: "logits", "softmax" or "sigmoid"; bias, [E]: added to sigmoid scores for the selection."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if kind == "logits":
        return scores.log_softmax(-1)
    if bias is not None:
        scores = scores - bias
    if kind == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return scores.clamp_min(_TINY).log()


def kl(log_p: Tensor, old_log_p: Tensor) -> Tensor:
    """`KL(p_old || p)`, [n]. Its gradient by the logits is `p - p_old`."""
    return (old_log_p.exp() * (old_log_p - log_p)).sum(-1)


def set_mass(log_p: Tensor, chosen: Tensor) -> Tensor:
    """`-log sum_{e in S} p_e`, [n]; no pull towards even gates within the set. chosen: [n, K]"""
    return -log_p.gather(-1, chosen).logsumexp(-1)


def cross_entropy(log_p: Tensor, chosen: Tensor) -> Tensor:
    """`-1/K sum_{e in S} log p_e`, [n]. chosen: int64 [n, K]"""
    return -log_p.gather(-1, chosen).mean(-1)


def balance_coefficients(counts: Tensor, weight: float, num_tokens: float) -> Tensor:
    """Return what an expert's probability costs on every token: `w E / n * counts_e / sum(counts)`.

    The load-balance loss `w E sum_e f_e P_e` of Switch Transformers (2101.03961), a plain sum over
    tokens: counts, [..., E] of all ranks and micro-batches, are fixed before the first one."""
    share = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    return weight * counts.size(-1) / max(num_tokens, 1.0) * share
