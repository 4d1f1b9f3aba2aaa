"""Per-token estimators of KL(policy || reference), for the loss. All [n] with gradient.

`d = log pi_ref - log pi_theta`, over the whole vocabulary also where sampling truncates;
`log_diff = log pi_theta - log pi_old`, over what could be sampled. They are token-level: the effect
of a token on later prefixes is left out.
"""

import torch
from torch import Tensor

from grpo_megatron.algorithms.ratios import bounded
from grpo_megatron.algorithms.registry import Registry

KL = Registry("kl")


@KL.register("k2")
def k2(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`d^2 / 2`: its gradient is the exact token-level one on policy."""
    return bounded(ref - logprobs) ** 2 / 2


@KL.register("k3")
def k3(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`e^d - d - 1` (Schulman): an unbiased value, but the gradient of KL(reference || policy);
    unbounded where the policy has become much less likely (GRPO, arXiv:2402.03300)."""
    d = bounded(ref - logprobs)
    return torch.expm1(d) - d


@KL.register("is_k3")
def is_k3(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`r k3`, with the gradient through the token ratio r: the exact token-level gradient, also
    off policy, bounded as the policy's probability vanishes (DeepSeek-V3.2, arXiv:2512.02556)."""
    return log_diff.exp() * k3(logprobs, ref, log_diff)
