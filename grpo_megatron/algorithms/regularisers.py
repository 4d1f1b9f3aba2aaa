"""Terms beside the clipped surrogate."""

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig


def llds(log_diff: Tensor, advantages: Tensor, sample: Tensor, counts: Tensor) -> Tensor:
    """`1[A >= 0] gate max(0, log pi_old - log pi_theta)`, [n]: against likelihood displacement of
    right answers (LLDS, arXiv:2512.04220). The gate is open for samples whose summed log-prob
    fell; it is detached."""
    drop = -log_diff
    total = drop.new_zeros(len(counts)).index_add(0, sample, drop.detach())
    return torch.where((advantages >= 0) & (total > 0)[sample], drop.clamp(min=0), 0.0)


def preference_coefficients(o: ObjectiveConfig, batch: SampleBatch, rewards: Tensor,
                            margins: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and value of `-log sigmoid(beta (m_best - m_worst))`, a mean over the groups with
    spread (of the domain, with `denominator = "domain"`), m the sum of `log pi_theta -
    log pi_old` over a sample.

    The best and the worst sample of a group may lie in different micro-batches, so the gradient
    goes through fixed coefficients: taken at the weights of this update they are exact.

    Args:
        rewards, margins: float64 [N].

    Returns:
        [N]: d loss / d m_i, and the loss, given to the best samples.
    """
    groups = Groups(batch.group_ids, batch.valid & batch.trained)
    live = groups.valid & (groups.centred(rewards) != 0)
    live = groups.valid & (groups.sum(live.double()) > 0)
    best = live & (groups.rank(-rewards, batch.sample_ids) == 0)
    worst = live & (groups.rank(rewards, batch.sample_ids) == 0)
    scope = batch.domains if o.denominator == "domain" else torch.zeros_like(batch.domains)
    pairs = Groups(scope, torch.ones_like(best)).sum(best.double()).clamp(min=1)
    gap = groups.sum(torch.where(best, margins, 0.0)) - groups.sum(
        torch.where(worst, margins, 0.0))
    pull = o.preference_weight * o.preference_beta * torch.sigmoid(-o.preference_beta * gap) / pairs
    loss = o.preference_weight * torch.nn.functional.softplus(-o.preference_beta * gap) / pairs
    return (torch.where(worst, pull, 0.0) - torch.where(best, pull, 0.0),
            torch.where(best, loss, 0.0))
