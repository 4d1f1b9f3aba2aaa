"""Update ratios pi_theta / pi_old at token, turn or sequence level, as logarithms, with gradient;
and detached weights for what the policy gradient did not sample itself.

Shape legend: n policy tokens of S samples, flat; `segment` int64 [n] in 0..S-1 is the sample (or
the turn) of each token; `counts` int64 [S]; `rho = pi_old / pi_engine`: trainer against engine,
plus the version lag. All return [n]."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import MismatchInputs
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig

CALIBRATION_QUANTILE = 0.99
CALIBRATION_FACTOR = 5.0
CALIBRATION_RANGE = (0.01, 0.5)
MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; the gradient beyond is zero
MIN_PROBABILITY = 1e-6
"""Probabilities are kept this far from 0 and from 1 in divergences of a token."""

RATIOS: Registry[Callable[[Tensor, Tensor, Tensor], Tensor]] = Registry()
"""`(log_diff, segment, counts) -> [n]`, the logarithm of the ratio; log_diff: [n] of tokens."""
MISMATCH: Registry[Callable[[ObjectiveConfig, Tensor, MismatchInputs], Tensor]] = Registry()
"""`(objective, log_rho, inputs) -> [n]`, detached, by which the surrogate is multiplied."""


@RATIOS.register("token")
def token_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`r_t = pi_theta / pi_old` of each token (PPO, GRPO)."""
    return log_diff


@RATIOS.register("prefix_min")
def prefix_min_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`r_t min_{u < t} r_u`: the lowest ratio among the sample's tokens before it stands for that
    of the whole prefix; 1 before the first. The gradient is that of the token's own ratio (MinPRO,
    arXiv:2601.22718)."""
    return bounded(log_diff + lowest_before(log_diff.detach(), segment))


@RATIOS.register("sequence_geo")
def sequence_geo_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`s_i = exp((1/T_i) sum_t log r_t)`: length-normalised, GSPO (arXiv:2507.18071 eq. 7)."""
    return segment_mean(log_diff, segment, counts)[segment]


@RATIOS.register("turn_geo")
def turn_geo_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """Like sequence_geo, over the tokens of one action (GAGPO); `segment` holds turns."""
    return sequence_geo_ratio(log_diff, segment, counts)


@RATIOS.register("sequence_token")
def sequence_token_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """GSPO-token: the value of sequence_geo, the gradient of each token's own log-prob."""
    value = segment_mean(log_diff.detach(), segment, counts)[segment]
    return value + log_diff - log_diff.detach()


@RATIOS.register("sequence_product")
def sequence_product_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`prod_t r_t`: the trajectory ratio (TIC-GRPO, arXiv:2508.02833)."""
    return bounded(segment_sum(log_diff, segment, counts))[segment]


@RATIOS.register("sequence_mean")
def sequence_mean_ratio(log_diff: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """`(1/T_i) sum_t r_t`: mean of the token ratios (GRPO-S, arXiv:2508.04349)."""
    return segment_mean(log_diff.exp(), segment, counts).clamp(min=1e-9).log()[segment]


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """`log pi_theta - log pi_old`, bounded; 0 where one is infinite. [n]"""
    difference = logprobs - old
    return torch.where(torch.isinf(difference), 0.0, bounded(difference))


def infinite_tokens(*columns: Tensor) -> Tensor:
    """Return which tokens have an infinite log-prob in any of the columns ([n] each), bool [n]: the
    loss leaves them out."""
    return torch.stack([torch.isinf(column.detach()) for column in columns]).any(0)


def bounded(values: Tensor) -> Tensor:
    """Keep `exp` of these finite: clamp to `MAX_LOG_RATIO` on both sides."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sum(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """Sum of the tokens of each segment, [n] -> [S]."""
    return values.new_zeros(len(counts)).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the tokens of each segment, [n] -> [S]; 0 for an empty one."""
    return segment_sum(values, segment, counts) / counts.clamp(min=1)


def segment_max(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """Return the largest value of the tokens of each segment, [n] -> [S]; minus infinity for an
    empty one."""
    start = values.new_full((len(counts),), -torch.inf)
    return start.scatter_reduce(0, segment, values, "amax")


def lowest_before(values: Tensor, segment: Tensor) -> Tensor:
    """Return the lowest value of the tokens before each one in its segment, [n]; 0 for the first.

    Segments follow one another. Spans are doubled, so that no length is asked of a device."""
    lowest = shifted(values, segment, 1, torch.inf)
    span = 1
    while span < len(values):
        lowest = torch.minimum(lowest, shifted(lowest, segment, span, torch.inf))
        span *= 2
    return torch.where(torch.isinf(lowest), 0.0, lowest)


def shifted(values: Tensor, segment: Tensor, by: int, missing: float) -> Tensor:
    """Return what each token finds `by` places before it in its segment, else `missing`: [n]. A
    negative `by` looks at later tokens."""
    found = values.roll(by)
    places = torch.arange(len(values), device=values.device) - by
    is_inside = (places >= 0) & (places < len(values))
    return torch.where(is_inside & (segment.roll(by) == segment), found, missing)


def discounted_from(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """`sum_{u >= t} factor^(u - t) x_u` over the tokens of the same segment, [n].

    Segments follow one another. Spans are doubled, so that no length is asked of a device."""
    total = values
    span = 1
    while span < len(values):
        total = total + factor**span * shifted(total, segment, -span, 0.0)
        span *= 2
    return total


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Return a proximal policy without a pass: `log pi_engine + a (log pi_theta - log pi_engine)`
    with `a = (d - 1) / d` for a token that is d versions old, 0 for d = 0 (A-3PO,
    arXiv:2512.06547): the weights one version before the present ones, if each version moved
    equally far.

    logprobs, rollout_logprobs: [n]; staleness: int64 [n]. Detached, [n]."""
    age = staleness.to(logprobs.dtype)
    share = (age - 1).clamp(min=0) / age.clamp(min=1)
    return torch.lerp(rollout_logprobs, logprobs.detach(), share)


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) of a token against all other tokens together, [n], in nats.

    logprobs, other: [n], `log p` and `log q`; probabilities are bounded by `MIN_PROBABILITY`."""
    p = logprobs.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    q = other.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    of_token = p * (p.log() - q.log())
    of_others = (1 - p) * (torch.log1p(-p) - torch.log1p(-q))
    return of_token + of_others


def mismatch_weights(o: ObjectiveConfig, inputs: MismatchInputs) -> Tensor:
    """Return the correction for the mismatch of trainer and engine by `objective.mismatch`, [n],
    detached."""
    inputs = replace(inputs, old_logprobs=inputs.old_logprobs.detach())
    log_rho = bounded(inputs.old_logprobs - inputs.rollout_logprobs)
    return MISMATCH[o.mismatch](o, log_rho, inputs)


@MISMATCH.register("tis")
def tis(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`max(min(rho_t, mismatch_max), mismatch_floor)`: truncated importance sampling per token."""
    return log_rho.exp().clamp(o.mismatch_floor, o.mismatch_max)


@MISMATCH.register("tis_sequence")
def tis_sequence(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`max(min(prod_t rho_t, mismatch_max), mismatch_floor)`: high variance for long samples."""
    product = bounded(segment_sum(log_rho, inputs.sample, inputs.token_counts)).exp()
    return product.clamp(o.mismatch_floor, o.mismatch_max)[inputs.sample]


@MISMATCH.register("mis_sequence")
def mis_sequence(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`prod rho` where it is within [mismatch_floor, mismatch_max], else 0: long samples are mostly
    masked."""
    product = bounded(segment_sum(log_rho, inputs.sample, inputs.token_counts)).exp()
    keep = (product >= o.mismatch_floor) & (product <= o.mismatch_max)
    return torch.where(keep, product, 0.0)[inputs.sample]


@MISMATCH.register("geometric_mask")
def geometric_mask(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`rho_t` in samples whose geometric mean of rho is within [mismatch_min, mismatch_max]."""
    mean = bounded(segment_mean(log_rho, inputs.sample, inputs.token_counts)).exp()
    keep = (mean >= o.mismatch_min) & (mean <= o.mismatch_max)
    return torch.where(keep[inputs.sample], log_rho.exp(), 0.0)


@MISMATCH.register("icepop")
def icepop(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`rho_t` where it is within [mismatch_min, mismatch_max], else 0 (IcePop). With a ratio of
    sequences or turns it weighs the token's term, whose gradient all of their tokens share: a token
    with weight 0 still moves by the terms of the others."""
    rho = log_rho.exp()
    return torch.where((rho >= o.mismatch_min) & (rho <= o.mismatch_max), rho, 0.0)


@MISMATCH.register("kpop")
def kpop(o: ObjectiveConfig, log_rho: Tensor, inputs: MismatchInputs) -> Tensor:
    """`rho_t` where `max(KL(p || q), KL(q || p)) <= kpop_threshold`, else 0: p the trainer's and q
    the engine's probability of the token against all others together (KPop, after IcePop). With a
    ratio of sequences or turns it weighs terms, as `icepop` does."""
    trainer = inputs.old_logprobs
    engine = inputs.rollout_logprobs
    divergence = torch.maximum(binary_kl(trainer, engine), binary_kl(engine, trainer))
    return torch.where(divergence <= o.kpop_threshold, log_rho.exp(), 0.0)


def calibrated_delta(distances: Tensor) -> float:
    """OPSM's threshold from the samples of the first step: 5 times their 99th percentile, within
    [0.01, 0.5]. distances: [S]. Ours: the paper does not publish a value."""
    low, high = CALIBRATION_RANGE
    if not len(distances):
        return high
    value = CALIBRATION_FACTOR * float(torch.quantile(distances.double(), CALIBRATION_QUANTILE))
    return min(max(value, low), high)
