"""Terms beside the clipped surrogate: KL to the reference, LLDS, preference.

The KL estimators are per token, [n] with gradient; the effect of a token on later prefixes is left
out. `d = log pi_ref - log pi_theta`, over the whole vocabulary also where sampling truncates;
`log_diff = log pi_theta - log pi_old`, over what could be sampled."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import ZERO_VARIANCE, Groups
from grpo_megatron.algorithms.ratios import bounded, segment_sum
from grpo_megatron.config.objective import ObjectiveConfig


def k2(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`d^2 / 2`: its gradient is the exact token-level one on policy."""
    return bounded(ref - logprobs) ** 2 / 2


def k3(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`e^d - d - 1` (Schulman): an unbiased value, but the gradient of KL(reference || policy);
    unbounded where the policy has become much less likely (GRPO, arXiv:2402.03300)."""
    d = bounded(ref - logprobs)
    return torch.expm1(d) - d


def is_k3(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`r k3`, with the gradient through the token ratio r: the exact token-level gradient, also
    off policy, bounded as the policy's probability vanishes (DeepSeek-V3.2, arXiv:2512.02556)."""
    return log_diff.exp() * k3(logprobs, ref, log_diff)


KL = {f.__name__: f for f in (k2, k3, is_k3)}


def llds(log_diff: Tensor, advantages: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`1[A >= 0] gate max(0, log pi_old - log pi_theta)`, [n]: against likelihood displacement of
    right answers (LLDS, arXiv:2512.04220). The gate is open for samples whose summed log-prob
    fell; it is detached."""
    drop = -log_diff
    fell = segment_sum(drop.detach(), sample, counts) > 0
    return torch.where((advantages >= 0) & fell[sample], drop.clamp(min=0), 0.0)


def preference_coefficients(o: ObjectiveConfig, batch: SampleBatch, rewards: Tensor,
                            margins: Tensor) -> tuple[Tensor, Tensor]:
    """`d loss / d m_i`, and the loss, given to the best samples, of
    `-log sigmoid(beta (m_best - m_worst))`, a mean over the groups with spread (of the domain, with
    `denominator = "domain"`), m the sum of `log pi_theta - log pi_old` over a sample. float64 [N]

    The best and the worst sample of a group may lie in different micro-batches, so the gradient
    goes through fixed coefficients: taken at the weights of this update they are exact."""
    groups = Groups(batch.group_ids, batch.valid & batch.trained)
    live = groups.valid & (groups.spread(rewards) > ZERO_VARIANCE)
    best = live & (groups.rank(-rewards, batch.sample_ids) == 0)
    worst = live & (groups.rank(rewards, batch.sample_ids) == 0)
    scope = batch.domains if o.denominator == "domain" else torch.zeros_like(batch.domains)
    pairs = Groups(scope, torch.ones_like(best)).sum(best.double()).clamp(min=1)
    sign = best.double() - worst.double()
    behind = -o.preference_beta * groups.sum(sign * margins)
    pull = o.preference_weight * o.preference_beta * torch.sigmoid(behind) / pairs
    loss = o.preference_weight * torch.nn.functional.softplus(behind) / pairs
    return -sign * pull, torch.where(best, loss, 0.0)
