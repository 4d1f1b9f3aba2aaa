"""What is measured of every micro-batch beside its loss. Metric names are `area/name`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import LossBatch
from grpo_megatron.algorithms.ratios import bounded, segment_sum
from grpo_megatron.algorithms.stats import Meter


def measure(meter: Meter, batch: LossBatch, ratio: Tensor, log_diff: Tensor, *,
            clipped: Mapping[str, Tensor], rejected: Mapping[str, Tensor], infinite: Tensor,
            factor: Tensor | None) -> None:
    """Fill `meter`. ratio, log_diff: [n], detached; factor: [n], what weighs the surrogate term;
    who was clipped, rejected, left out: bool [n]."""
    if clipped:
        clipped = {**clipped, "region": torch.stack(list(clipped.values())).any(0)}
    causes = {f"clip/{side}": mask for side, mask in clipped.items()}
    causes |= {f"rejected/{cause}": mask for cause, mask in rejected.items()}
    for name, mask in causes.items():
        meter.mean(f"{name}_fraction", mask)
        of_samples = segment_sum(mask.float(), batch.sample, batch.token_counts) > 0
        meter.mean(f"{name}_sample_fraction", of_samples, "samples")
    meter.mean("ratio/mean", ratio)
    meter.maximum("ratio/max", ratio)
    meter.mean("policy/entropy", batch.entropies)
    meter.mean("advantage/abs_mean", batch.advantages.abs())
    meter.mean("tokens/infinite_fraction", infinite)
    if factor is not None:
        meter.mean("weight/mean", factor)
        meter.mean("weight/square", factor.double() ** 2)
    _mismatch(meter, batch)
    measure_move(meter, "update", log_diff, batch.advantages)
    logprobs = batch.logprobs.detach()
    meter.mean("policy/logprob_positive", logprobs, where=batch.advantages > 0)
    meter.mean("policy/logprob_negative", logprobs, where=batch.advantages < 0)
    if batch.ref_logprobs is not None:
        measure_reference(meter, batch.untruncated_logprobs.detach(), batch.ref_logprobs)


def measure_reference(meter: Meter, logprobs: Tensor, ref: Tensor) -> None:
    """KL(policy || reference). [n] each."""
    difference = (ref - logprobs).double()
    meter.mean("reference/k1", -difference)
    meter.mean("reference/k3", torch.expm1(bounded(difference)) - difference)


def measure_move(meter: Meter, area: str, log_diff: Tensor, advantages: Tensor) -> None:
    """The old policy against the new one, and by how much right and wrong answers became likelier,
    which falls below 0 for right ones in lazy likelihood displacement (arXiv:2512.04220).
    log_diff: [n], new less old."""
    meter.mean(f"{area}/k1", -log_diff)
    meter.mean(f"{area}/k2", log_diff**2 / 2)
    meter.mean(f"{area}/logprob_gain_positive", log_diff, where=advantages > 0)
    meter.mean(f"{area}/logprob_gain_negative", log_diff, where=advantages < 0)


def derived(metrics: dict[str, float]) -> dict[str, float]:
    """Effective sample sizes `(sum w)^2 / (n sum w^2)` from the means of w and of w^2."""
    for name in [n for n in metrics if n.partition("@")[0].endswith("/square")]:
        mean = metrics[name.replace("/square", "/mean")]
        square = metrics.pop(name)
        metrics[name.replace("/square", "/ess_fraction")] = (
            mean**2 / square if square > 0 else 0.0)
    return metrics


def _mismatch(meter: Meter, batch: LossBatch) -> None:
    """How far trainer and engine are apart on the same tokens, from the engine's samples:
    k1 and k3 estimate KL(engine || trainer), chi2 is `E[rho^2] - 1`."""
    # k3 of a rounding difference is far below fp32's resolution of e^d
    difference = (batch.old_logprobs.detach() - batch.rollout_logprobs).double()
    rho = bounded(difference).exp()
    meter.mean("mismatch/k1", -difference)
    meter.mean("mismatch/k3", torch.expm1(bounded(difference)) - difference)
    meter.mean("mismatch/abs_mean", difference.abs())
    meter.maximum("mismatch/abs_max", difference.abs())
    meter.mean("mismatch/exp_abs_mean", bounded(difference.abs()).exp())
    meter.mean("mismatch/chi2", rho**2 - 1)
    meter.mean("mismatch/rho/mean", rho)
    meter.mean("mismatch/rho/square", rho**2)
