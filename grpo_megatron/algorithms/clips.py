"""Surrogate terms, to be maximised, and which tokens have lost their gradient. All [n].

Shape legend: n policy tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """`sg(clip(r, ratio_min, ratio_max)) A log pi`: bounds are absolute, every token keeps its
    gradient (CISPO, arXiv:2506.13585)."""
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
    up, down, log_ratio = u.advantages > 0, u.advantages < 0, u.log_ratio.detach()
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
