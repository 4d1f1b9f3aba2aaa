"""Terms of the loss: surrogates, to be maximised, and which tokens have lost their gradient; KL to
the reference, LLDS, preference. All [n], n policy tokens.

The KL estimators are per token, with gradient; the effect of a token on later prefixes is left
out. `d = log pi_ref - log pi_theta`, over the whole vocabulary also where sampling truncates;
`log_diff = log pi_theta - log pi_old`, over what could be sampled."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import ClipInputs, SampleBatch
from grpo_megatron.algorithms.custom import function_of, holds
from grpo_megatron.algorithms.groups import ZERO_VARIANCE, Groups
from grpo_megatron.algorithms.preferences import sigmoid_loss, sigmoid_loss_slope
from grpo_megatron.algorithms.ratios import binary_kl, bounded, segment_sum
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig

VESPO_MIN_LOG_RATIO = math.log(1e-8)

CLIPS: Registry[Callable[[ObjectiveConfig, ClipInputs], Tensor]] = Registry()
"""Surrogates: `(objective, inputs) -> [n]`, to be maximised."""
KL: Registry[Callable[[Tensor, Tensor, Tensor], Tensor]] = Registry()
"""Estimators of the KL to the reference: `(logprobs, ref_logprobs, log_diff) -> [n]`."""


# --- which tokens a clip holds


def _outside(ratio: Tensor, inputs: ClipInputs) -> tuple[Tensor, Tensor]:
    """Return which ratios are below and above the clip distances, bool [n] each."""
    return ratio < 1 - inputs.low, ratio > 1 + inputs.high


def _held_by_ppo(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    ratio = inputs.log_ratio.detach().exp()
    negative = inputs.advantages < 0
    below, above = _outside(ratio, inputs)
    held = {"low": negative & below, "high": (inputs.advantages > 0) & above}
    if o.dual_clip is not None:
        held["dual"] = negative & (ratio > o.dual_clip)
    return held


def _held_above(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    return {"high": _held_on_both_sides(o, inputs)["high"]}


def _held_on_both_sides(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    has_sign = inputs.advantages.abs() > 0
    below, above = _outside(inputs.log_ratio.detach().exp(), inputs)
    return {"low": has_sign & below, "high": has_sign & above}


def _held_by_gmpo(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    log_ratio = inputs.log_ratio.detach()
    return {
        "low": (inputs.advantages < 0) & (log_ratio < -inputs.low),
        "high": (inputs.advantages > 0) & (log_ratio > inputs.high),
    }


def _bounded_by_cispo(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    ratio = inputs.log_ratio.detach().exp()
    has_sign = inputs.advantages.abs() > 0
    return {"low": has_sign & (ratio < o.ratio_min), "high": has_sign & (ratio > o.ratio_max)}


def _bounded_by_topr(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    ratio = inputs.log_ratio.detach().exp()
    negative = inputs.advantages < 0
    return {
        "low": negative & (ratio < o.topr_min_negative),
        "high": negative & (ratio > o.topr_max_negative),
    }


def _outside_of_trust_region(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    ratio = inputs.log_ratio.detach().exp()
    divergence = _divergence_of_token(o, inputs)
    return {
        "low": (inputs.advantages < 0) & (ratio < 1) & (divergence > inputs.low),
        "high": (inputs.advantages > 0) & (ratio > 1) & (divergence > inputs.high),
    }


def _divergence_of_token(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """DPPO's divergence of the old policy and the present one, detached, [n]."""
    logprobs = inputs.logprobs.detach()
    old_logprobs = inputs.old_logprobs
    if o.clip == "dppo_tv":
        return (logprobs.exp() - old_logprobs.exp()).abs()
    return binary_kl(old_logprobs, logprobs)


def _held_by_clip_cov(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    return _held_by_ppo(o, inputs) | _covariant(o, inputs)


def _covariant(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    assert inputs.covariant is not None  # see `LossConstants.covariant`
    return {"covariance": inputs.covariant}


# --- clips


@CLIPS.register("ppo")
@holds(_held_by_ppo, plain_elsewhere=True)
def ppo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` (PPO, arXiv:1707.06347; asymmetric: DAPO,
    arXiv:2503.14476). dual_clip c: for A < 0 at least `c A` (arXiv:1912.09729)."""
    ratio = inputs.log_ratio.exp()
    clipped = ratio.clamp(min=1.0 - inputs.low).clamp(max=1.0 + inputs.high)
    advantages = inputs.advantages
    term = torch.minimum(ratio * advantages, clipped * advantages)
    if o.dual_clip is None:
        return term
    lowest = o.dual_clip * advantages
    return torch.where(advantages < 0, torch.maximum(term, lowest), term)


@CLIPS.register("upper")
@holds(_held_above, plain_elsewhere=True)
def clipped_above(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`min(r, 1 + high) A`: clipped above only, for both signs (TIC-GRPO, arXiv:2508.02833)."""
    return inputs.log_ratio.exp().clamp(max=1.0 + inputs.high) * inputs.advantages


@CLIPS.register("both")
@holds(_held_on_both_sides, plain_elsewhere=True)
def clipped_on_both_sides(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`clip(r, 1 - low, 1 + high) A`: no gradient outside of the bounds, whatever the sign of A
    (Kimi K2.5, arXiv:2602.02276 eq. 1, which beside it has `rollout_drift_weight`)."""
    ratio = inputs.log_ratio.exp()
    return ratio.clamp(min=1.0 - inputs.low).clamp(max=1.0 + inputs.high) * inputs.advantages


@CLIPS.register("gmpo")
@holds(_held_by_gmpo)
def gmpo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`exp(mean_t clip(log r_t)) A`: tokens are clipped before their mean (`gmpo_clip`), one side
    only, by the sign of A; nothing is clipped after it (GMPO, arXiv:2507.20673)."""
    return inputs.log_ratio.exp() * inputs.advantages


@CLIPS.register("cispo")
@holds(_bounded_by_cispo)
def cispo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """CISPO (arXiv:2506.13585), no gradient cut: `sg(clip(r, ratio_min, ratio_max)) A log pi`."""
    weight = inputs.log_ratio.detach().exp().clamp(o.ratio_min, o.ratio_max)
    return weight * inputs.advantages * inputs.logprobs


@CLIPS.register("sapo")
def sapo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A (SAPO, arXiv:2511.20347)."""
    positive = torch.full_like(inputs.advantages, o.sapo_tau_positive)
    tau = torch.where(inputs.advantages > 0, positive, o.sapo_tau_negative)
    return 4 / tau * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1)) * inputs.advantages


@CLIPS.register("vespo")
def vespo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """VESPO (arXiv:2602.10693), no gradient cut: `sg(W^k exp(lambda (1 - W))) A log pi`, W the
    product of the ratios over the sequence, at least 1e-8; k and lambda by the sign of A."""
    log_w = inputs.log_ratio.detach().clamp(min=VESPO_MIN_LOG_RATIO)
    w = log_w.exp()
    of_positive = o.vespo_k_positive * log_w + o.vespo_lambda_positive * (1 - w)
    of_negative = o.vespo_k_negative * log_w + o.vespo_lambda_negative * (1 - w)
    log_weight = torch.where(inputs.advantages >= 0, of_positive, of_negative)
    return log_weight.exp() * inputs.advantages * inputs.logprobs


@CLIPS.register("topr")
@holds(_bounded_by_topr)
def topr(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """TOPR (arXiv:2503.14286), no gradient cut: `sg(clip(r, min, max)) A log pi` with bounds by the
    sign of A: 1 and 1 where A >= 0, 0 and 1 where A < 0. The ratio of the paper is that of the
    trajectory, `sequence_product`, against the policy that sampled (`proximal = "rollout"`)."""
    ratio = inputs.log_ratio.detach().exp()
    of_positive = ratio.clamp(o.topr_min_positive, o.topr_max_positive)
    of_negative = ratio.clamp(o.topr_min_negative, o.topr_max_negative)
    weight = torch.where(inputs.advantages >= 0, of_positive, of_negative)
    return weight * inputs.advantages * inputs.logprobs


@CLIPS.register("dppo_tv")
@holds(_outside_of_trust_region, plain_elsewhere=True)
def dppo_tv(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`r A`, and 0 for tokens whose probability `pi_theta` has left `pi_old` by more than
    `clip_high` upwards where A > 0, by more than `clip_low` downwards where A < 0: total variation
    of the token against all others (DPPO, arXiv:2602.04879, whose old policy is the engine's:
    `proximal = "rollout"`)."""
    return _within_trust_region(o, inputs)


@CLIPS.register("dppo_kl")
@holds(_outside_of_trust_region, plain_elsewhere=True)
def dppo_kl(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """Like dppo_tv, by `KL(pi_old || pi_theta)` of the token against all others."""
    return _within_trust_region(o, inputs)


@CLIPS.register("drpo")
def drpo(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """DRPO (arXiv:2606.09821), no gradient cut: `r A - |A| pi_old (r - 1)^2 / (2 drpo_delta)`. The
    weight of `A grad log pi` is `r (1 - sign(A) (pi_theta - pi_old) / drpo_delta)`: as DPPO's trust
    region of probabilities, but a token beyond it is pulled back. The paper's old policy is the
    engine's: `proximal = "rollout"`."""
    ratio = inputs.log_ratio.exp()
    old_probs = inputs.old_logprobs.exp()
    penalty = inputs.advantages.abs() * old_probs * (ratio - 1) ** 2 / (2 * o.drpo_delta)
    return ratio * inputs.advantages - penalty


def _within_trust_region(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`r A` of the tokens inside, 0 of the others."""
    held = torch.stack(list(_outside_of_trust_region(o, inputs).values())).any(0)
    return torch.where(held, 0.0, unclipped(o, inputs))


@CLIPS.register("clip_cov")
@holds(_held_by_clip_cov, plain_elsewhere=True)
def clip_cov(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """Like ppo, and 0 for tokens that were chosen by the covariance of their log-prob and
    advantage, against the collapse of entropy (Clip-Cov, arXiv:2505.22617;
    `algorithms.token_selection`)."""
    assert inputs.covariant is not None  # see `LossConstants.covariant`
    return torch.where(inputs.covariant, 0.0, ppo(o, inputs))


@CLIPS.register("kl_cov")
@holds(_covariant)
def kl_cov(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`r A - covariance_penalty |log r|` for the tokens with the highest covariance of log-prob and
    advantage, `r A` for the others (KL-Cov, arXiv:2505.22617)."""
    assert inputs.covariant is not None  # see `LossConstants.covariant`
    penalty = o.covariance_penalty * inputs.log_ratio.abs()
    return unclipped(o, inputs) - torch.where(inputs.covariant, penalty, 0.0)


@CLIPS.register("none")
def unclipped(o: ObjectiveConfig, inputs: ClipInputs) -> Tensor:
    """`r A`."""
    return inputs.log_ratio.exp() * inputs.advantages


def gmpo_clip(inputs: ClipInputs) -> Tensor:
    """`log r_t` at most `high` where A > 0, at least `-low` where A < 0."""
    log_ratio = inputs.log_ratio
    not_too_low = log_ratio.clamp(min=-inputs.low)
    not_too_high = log_ratio.clamp(max=inputs.high)
    of_negative = torch.where(inputs.advantages < 0, not_too_low, log_ratio)
    return torch.where(inputs.advantages > 0, not_too_high, of_negative)


def clip_status(o: ObjectiveConfig, inputs: ClipInputs) -> dict[str, Tensor]:
    """Return where the clip holds a token, bool [n] by name, as its `custom.holds` says: where it
    removes the gradient (cispo, topr: bounds the weight; kl_cov: penalises).

    Names are "low", "high", "dual" and "covariance"; nothing for a clip without a status. A token
    with A = 0 has none of the first three, nor one with A > 0 for topr. For gmpo,
    `inputs.log_ratio` is that of tokens."""
    status = getattr(function_of("clip", o.clip, CLIPS), "clip_status", None)
    if status is None:
        return {}
    return dict(status(o, inputs))


def follows_recorded_clips(o: ObjectiveConfig) -> bool:
    """Whether a replay takes the recorded decisions of the clip: `r A` for the tokens that it did
    not hold, no gradient for the others."""
    return getattr(function_of("clip", o.clip, CLIPS), "plain_elsewhere", False)


def clipped_as(recorded: Mapping[str, Tensor], status: Mapping[str, Tensor]) -> Tensor:
    """Return who was clipped on any side, as recorded, else by the present `status`. bool [n]"""
    of_sides = [recorded.get(side, now) for side, now in status.items()]
    return torch.stack(of_sides).any(0)


@KL.register("k2")
def k2(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`d^2 / 2`: its gradient is the exact token-level one on policy."""
    return bounded(ref - logprobs) ** 2 / 2


@KL.register("is_k2")
def is_k2(logprobs: Tensor, ref: Tensor, log_diff: Tensor) -> Tensor:
    """`r k2`, with the gradient through the token ratio r: that of the value which k2 estimates,
    `E[d^2 / 2]` under the policy, also off policy (as NeMo-RL's k2)."""
    return log_diff.exp() * k2(logprobs, ref, log_diff)


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
    has_signal = groups.valid & (groups.spread(rewards) > ZERO_VARIANCE)
    best = has_signal & (groups.rank(-rewards, batch.sample_ids) == 0)
    worst = has_signal & (groups.rank(rewards, batch.sample_ids) == 0)
    scopes = Groups(batch.scopes(o.denominator), torch.ones_like(best))
    pairs = scopes.sum(best.double()).clamp(min=1)
    sign = best.double() - worst.double()
    ahead = o.preference_beta * groups.sum(sign * margins)
    slope = o.preference_weight * o.preference_beta * sigmoid_loss_slope(ahead) / pairs
    loss = o.preference_weight * sigmoid_loss(ahead) / pairs
    return sign * slope, torch.where(best, loss, 0.0)
