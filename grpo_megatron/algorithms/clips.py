"""Surrogate terms, to be maximised, and which tokens have lost their gradient.

Shape legend: n policy tokens; `log_ratio` [n] with gradient, at the level of the ratio;
`advantages` [n]; `bounds.low` and `bounds.high` are numbers or [n].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig

CLIPS = Registry("clip")


@dataclass(frozen=True)
class Bounds:
    """Clip distances, per domain where domains have their own."""

    low: float | Tensor
    high: float | Tensor


@CLIPS.register("ppo")
def ppo(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
        logprobs: Tensor) -> Tensor:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` (PPO, arXiv:1707.06347; asymmetric: DAPO,
    arXiv:2503.14476). dual_clip c: for A < 0 at least `c A` (arXiv:1912.09729)."""
    ratio = log_ratio.exp()
    clipped = torch.minimum(torch.maximum(ratio, _as(ratio, 1.0 - bounds.low)),
                            _as(ratio, 1.0 + bounds.high))
    term = torch.minimum(ratio * advantages, clipped * advantages)
    if o.dual_clip is None:
        return term
    return torch.where(advantages < 0, torch.maximum(term, o.dual_clip * advantages), term)


@CLIPS.register("upper")
def upper(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
          logprobs: Tensor) -> Tensor:
    """`min(r, 1 + high) A`: clipped above only, for both signs (TIC-GRPO, arXiv:2508.02833)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio, _as(ratio, 1.0 + bounds.high)) * advantages


@CLIPS.register("gmpo")
def gmpo(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
         logprobs: Tensor) -> Tensor:
    """`exp(mean_t clip(log r_t)) A`: tokens are clipped before their mean (`gmpo_clip`), one side
    only, by the sign of A; nothing is clipped after it (GMPO, arXiv:2507.20673)."""
    return log_ratio.exp() * advantages


@CLIPS.register("cispo")
def cispo(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
          logprobs: Tensor) -> Tensor:
    """`sg(clip(r, ratio_min, ratio_max)) A log pi`: bounds are absolute, every token keeps its
    gradient (CISPO, arXiv:2506.13585)."""
    return log_ratio.detach().exp().clamp(o.ratio_min, o.ratio_max) * advantages * logprobs


@CLIPS.register("sapo")
def sapo(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
         logprobs: Tensor) -> Tensor:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A (SAPO, arXiv:2511.20347)."""
    tau = torch.where(advantages > 0, _as(log_ratio, o.sapo_tau_positive),
                      _as(log_ratio, o.sapo_tau_negative))
    return 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages


@CLIPS.register("none")
def none(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor, bounds: Bounds,
         logprobs: Tensor) -> Tensor:
    """`r A`."""
    return log_ratio.exp() * advantages


def gmpo_clip(log_diff: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`log r_t` at most `high` where A > 0, at least `-low` where A < 0. [n]"""
    above = torch.minimum(log_diff, _as(log_diff, bounds.high))
    below = torch.maximum(log_diff, _as(log_diff, -bounds.low))
    return torch.where(advantages > 0, above, torch.where(advantages < 0, below, log_diff))


def clip_status(o: ObjectiveConfig, log_ratio: Tensor, advantages: Tensor,
                bounds: Bounds) -> dict[str, Tensor]:
    """Where the clip removes the gradient (cispo: bounds the weight), bool [n] by name.

    A token with A = 0 has no clip status. `log_ratio` is detached; for gmpo, of tokens.
    """
    up, down = advantages > 0, advantages < 0
    if o.clip == "gmpo":
        return {"low": down & (log_ratio < -bounds.low), "high": up & (log_ratio > bounds.high)}
    ratio = log_ratio.exp()
    if o.clip == "cispo":
        live = up | down
        return {"low": live & (ratio < o.ratio_min), "high": live & (ratio > o.ratio_max)}
    if o.clip == "upper":
        return {"high": (up | down) & (ratio > 1 + bounds.high)}
    if o.clip == "ppo":
        found = {"low": down & (ratio < 1 - bounds.low), "high": up & (ratio > 1 + bounds.high)}
        if o.dual_clip is not None:
            found["dual"] = down & (ratio > o.dual_clip)
        return found
    return {}


def clipped_as(decisions: Mapping[str, Tensor], status: Mapping[str, Tensor]) -> Tensor:
    """Who was clipped on any side by recorded decisions, by the present `status` where none are
    recorded. bool [n]"""
    return torch.stack([decisions.get(side, now) for side, now in status.items()]).any(0)


def _as(like: Tensor, value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_tensor(value)
