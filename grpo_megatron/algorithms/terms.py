"""Terms of the loss: surrogates, to be maximised, and which tokens have lost their gradient; KL to
the reference, LLDS, preference. All [n], n policy tokens.

The KL estimators are per token, with gradient; the effect of a token on later prefixes is left
out. `d = log pi_ref - log pi_theta`, over the whole vocabulary also where sampling truncates;
`log_diff = log pi_theta - log pi_old`, over what could be sampled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import ZERO_VARIANCE, Groups, SampleBatch
from grpo_megatron.algorithms.ratios import bounded, segment_sum
from grpo_megatron.config.objective import ObjectiveConfig


@dataclass(frozen=True)
class Update:
    """What a term is made of. Clip distances are numbers, or [n] where domains have their own."""

    log_ratio: Tensor  # [n] with gradient, at the level of the ratio
    advantages: Tensor  # [n]
    logprobs: Tensor  # [n] with gradient
    low: float | Tensor
    high: float | Tensor


def ppo(o: ObjectiveConfig, u: Update) -> Tensor:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` (PPO, arXiv:1707.06347; asymmetric: DAPO,
    arXiv:2503.14476). dual_clip c: for A < 0 at least `c A` (arXiv:1912.09729)."""
    ratio = u.log_ratio.exp()
    clipped = ratio.clamp(min=1.0 - u.low).clamp(max=1.0 + u.high)
    term = torch.minimum(ratio * u.advantages, clipped * u.advantages)
    if o.dual_clip is None:
        return term
    return torch.where(u.advantages < 0, torch.maximum(term, o.dual_clip * u.advantages), term)


def upper(o: ObjectiveConfig, u: Update) -> Tensor:
    """`min(r, 1 + high) A`: clipped above only, for both signs (TIC-GRPO, arXiv:2508.02833)."""
    return u.log_ratio.exp().clamp(max=1.0 + u.high) * u.advantages


def gmpo(o: ObjectiveConfig, u: Update) -> Tensor:
    """`exp(mean_t clip(log r_t)) A`: tokens are clipped before their mean (`gmpo_clip`), one side
    only, by the sign of A; nothing is clipped after it (GMPO, arXiv:2507.20673)."""
    return u.log_ratio.exp() * u.advantages


def cispo(o: ObjectiveConfig, u: Update) -> Tensor:
    """CISPO (arXiv:2506.13585), no gradient cut: `sg(clip(r, ratio_min, ratio_max)) A log pi`."""
    return u.log_ratio.detach().exp().clamp(o.ratio_min, o.ratio_max) * u.advantages * u.logprobs


def sapo(o: ObjectiveConfig, u: Update) -> Tensor:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A (SAPO, arXiv:2511.20347)."""
    positive = u.log_ratio.new_tensor(o.sapo_tau_positive)
    tau = torch.where(u.advantages > 0, positive, o.sapo_tau_negative)
    return 4 / tau * torch.sigmoid(tau * (u.log_ratio.exp() - 1)) * u.advantages


def none(o: ObjectiveConfig, u: Update) -> Tensor:
    """`r A`."""
    return u.log_ratio.exp() * u.advantages


CLIPS = {f.__name__: f for f in (ppo, upper, gmpo, cispo, sapo, none)}


def gmpo_clip(u: Update) -> Tensor:
    """`log r_t` at most `high` where A > 0, at least `-low` where A < 0."""
    below = torch.where(u.advantages < 0, u.log_ratio.clamp(min=-u.low), u.log_ratio)
    return torch.where(u.advantages > 0, u.log_ratio.clamp(max=u.high), below)


def clip_status(o: ObjectiveConfig, u: Update) -> dict[str, Tensor]:
    """Where the clip removes the gradient (cispo: bounds the weight), bool [n] by name.

    A token with A = 0 has no clip status. For gmpo, `u.log_ratio` is that of tokens."""
    up = u.advantages > 0
    down = u.advantages < 0
    log_ratio = u.log_ratio.detach()
    if o.clip == "gmpo":
        return {"low": down & (log_ratio < -u.low), "high": up & (log_ratio > u.high)}
    ratio = log_ratio.exp()
    if o.clip == "cispo":
        live = up | down
        return {"low": live & (ratio < o.ratio_min), "high": live & (ratio > o.ratio_max)}
    if o.clip == "upper":
        return {"high": (up | down) & (ratio > 1 + u.high)}
    if o.clip == "ppo":
        found = {"low": down & (ratio < 1 - u.low), "high": up & (ratio > 1 + u.high)}
        return found if o.dual_clip is None else {**found, "dual": down & (ratio > o.dual_clip)}
    return {}


def clipped_as(decisions: Mapping[str, Tensor], status: Mapping[str, Tensor]) -> Tensor:
    """Who was clipped on any side, as recorded, else by the present `status`. bool [n]"""
    return torch.stack([decisions.get(side, now) for side, now in status.items()]).any(0)


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
    right answers (LLDS, arXiv:2512.04220). The gate, detached, is open where the sum fell."""
    drop = -log_diff
    fell = segment_sum(drop.detach(), sample, counts) > 0
    return torch.where((advantages >= 0) & fell[sample], drop.clamp(min=0), 0.0)


def preference_coefficients(
    o: ObjectiveConfig, batch: SampleBatch, rewards: Tensor, margins: Tensor
) -> tuple[Tensor, Tensor]:
    """`d loss / d m_i`, and the loss, given to the best samples, of
    `-log sigmoid(beta (m_best - m_worst))`, a mean over the groups with spread (of the domain, with
    `denominator = "domain"`), m the sum of `log pi_theta - log pi_ref` over a sample, which is
    DPO's implicit reward (arXiv:2305.18290). float64 [N]

    Fixed coefficients, since both may lie in different micro-batches: exact at these weights."""
    groups = Groups(batch.group_ids, batch.valid & batch.trained)
    live = groups.valid & (groups.spread(rewards) > ZERO_VARIANCE)
    best = live & (groups.rank(-rewards, batch.sample_ids) == 0)
    worst = live & (groups.rank(rewards, batch.sample_ids) == 0)
    scopes = Groups(batch.scopes(o.denominator), torch.ones_like(best))
    pairs = scopes.sum(best.double()).clamp(min=1)
    sign = best.double() - worst.double()
    behind = -o.preference_beta * groups.sum(sign * margins)
    pull = o.preference_weight * o.preference_beta * torch.sigmoid(behind) / pairs
    loss = o.preference_weight * torch.nn.functional.softplus(behind) / pairs
    return -sign * pull, torch.where(best, loss, 0.0)
