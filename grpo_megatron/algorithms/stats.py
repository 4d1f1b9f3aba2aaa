"""Metrics that stay exact when they are added over micro-batches and ranks, and what is measured of
every micro-batch beside its loss. Names are `area/name`.

A mean is carried as (sum, count), a maximum as itself; domains have `name@domain` beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import LossBatch
from grpo_megatron.algorithms.ratios import bounded, segment_sum


@dataclass
class Stats:
    """Metrics of a micro-batch, of a rank or of a step, by name."""

    means: dict[str, Tensor] = field(default_factory=dict)
    """Tensors float64 [2]: (sum, count)."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    """Values that are kept one by one, [S] each; NaN for samples that have none."""
    units: dict[str, str] = field(default_factory=dict)
    """What a metric is normalised by: tokens, samples, weight, or sum and max for neither."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Which tokens were clipped or rejected, bool [n] of this micro-batch; never added up."""

    def set_mean(
        self, name: str, total: Tensor, count: Tensor | float, unit: str = "tokens"
    ) -> None:
        """Set a mean by its sum and what it is divided by, both scalars; unit "sum": a plain sum,
        whose count means nothing."""
        total = total.detach().double()
        if isinstance(count, Tensor):
            divisor = count.detach().to(total)
        else:
            divisor = torch.full_like(total, count)
        self.means[name] = torch.stack([total, divisor])
        self.units[name] = unit

    def set_maximum(self, name: str, values: Tensor) -> None:
        """Set a maximum, of `values` of any shape; minus infinity of none."""
        values = values.detach().double()
        if values.numel():
            self.maxima[name] = values.max()
        else:
            self.maxima[name] = values.new_full((), -torch.inf)
        self.units[name] = "max"

    def add(self, other: Self) -> None:
        """Take in the metrics of another micro-batch, rank or update; masks stay as they are."""
        self.units |= other.units
        for name, sum_and_count in other.means.items():
            if name in self.means:
                sum_and_count = self.means[name] + sum_and_count
            self.means[name] = sum_and_count
        for name, largest in other.maxima.items():
            if name in self.maxima:
                largest = torch.maximum(self.maxima[name], largest)
            self.maxima[name] = largest
        for name, values in other.samples.items():
            if name in self.samples:
                values = torch.cat([self.samples[name], values])
            self.samples[name] = values

    def kept_samples(self) -> dict[str, Tensor]:
        """Return the values that were kept one by one, by name, [number of values]; samples without
        one (NaN) are left out."""
        return {name: values[~values.isnan()] for name, values in self.samples.items()}

    def result(self) -> dict[str, float]:
        """Return numbers by name: means, sums (unit "sum") as they are, maxima; what nothing was
        counted for is left out."""
        numbers = {}
        for name, (total, count) in self.means.items():
            if self.units.get(name) == "sum":
                numbers[name] = float(total)
            elif count > 0:
                numbers[name] = float(total / count)
        for name, value in self.maxima.items():
            if value > -torch.inf:
                numbers[name] = float(value)
        return numbers


class MetricRecorder:
    """Fills a `Stats` with values per token or per sample of one micro-batch; by domain too where
    there are several. token_domain, sample_domain: int64 [n] and [S]."""

    def __init__(self, token_domain: Tensor | None, sample_domain: Tensor, domains: Sequence[str]):
        self.stats = Stats()
        self._domains: Sequence[str] = ()
        self._is_of_domain: dict[str, Tensor] = {}
        """By unit, bool [D, n] or [D, S]. Selecting by them would let the host wait for sizes."""
        if len(domains) > 1 and token_domain is not None:
            self._domains = domains
            numbers = torch.arange(len(domains), device=sample_domain.device)[:, None]
            self._is_of_domain = {
                "tokens": token_domain == numbers,
                "samples": sample_domain == numbers,
            }

    def set_mean(
        self, name: str, values: Tensor, unit: str = "tokens", where: Tensor | None = None
    ) -> None:
        """Record the mean of `values` ([n] or [S] by unit), of those with `where` only."""
        values = values.detach().double()
        counts = torch.ones_like(values)
        if where is not None:
            counts = where.double()
            values = torch.where(where, values, 0.0)
        self.stats.set_mean(name, values.sum(), counts.sum(), unit)
        if not self._domains:
            return
        here = self._is_of_domain[unit]
        totals = torch.where(here, values, 0.0).sum(1)
        counts_here = torch.where(here, counts, 0.0).sum(1)
        for label, total, count in zip(self._domains, totals, counts_here, strict=True):
            self.stats.set_mean(f"{name}@{label}", total, count, unit)

    def set_maximum(self, name: str, values: Tensor) -> None:
        """Record the maximum of `values`, [n]."""
        self.stats.set_maximum(name, values)
        for number, label in enumerate(self._domains):
            here = self._is_of_domain["tokens"][number]
            self.stats.set_maximum(f"{name}@{label}", torch.where(here, values, -torch.inf))


def measure(
    meter: MetricRecorder,
    batch: LossBatch,
    ratio: Tensor,
    log_diff: Tensor,
    *,
    clipped: Mapping[str, Tensor],
    rejected: Mapping[str, Tensor],
    infinite: Tensor,
    factor: Tensor | None,
) -> None:
    """Fill `meter` with what is known of every token beside its loss.

    ratio, log_diff (of tokens), factor of the surrogate term: [n], detached; clipped, rejected:
    bool [n] by cause; infinite: bool [n], tokens with an infinite log-prob."""
    for side, mask in clipped.items():
        _measure_mask(meter, f"clip/{side}", mask, batch)
    if clipped:
        anywhere = torch.stack(list(clipped.values())).any(0)
        _measure_mask(meter, "clip/region", anywhere, batch)
    for cause, mask in rejected.items():
        _measure_mask(meter, f"rejected/{cause}", mask, batch)
    meter.set_mean("ratio/mean", ratio)
    meter.set_mean("ratio/square", ratio.double() ** 2)
    meter.set_maximum("ratio/max", ratio)
    meter.set_mean("policy/entropy", batch.entropies)
    meter.set_mean("advantage/abs_mean", batch.advantages.abs())
    meter.set_mean("tokens/infinite_fraction", infinite)
    if factor is not None:
        meter.set_mean("weight/mean", factor)
        meter.set_mean("weight/square", factor.double() ** 2)
    _mismatch(meter, batch)
    measure_move(meter, "update", log_diff, batch.advantages)
    logprobs = batch.logprobs.detach()
    meter.set_mean("policy/logprob_positive", logprobs, where=batch.advantages > 0)
    meter.set_mean("policy/logprob_negative", logprobs, where=batch.advantages < 0)
    if batch.ref_logprobs is not None:
        measure_kl(meter, "reference", batch.untruncated_logprobs.detach(), batch.ref_logprobs)


def _measure_mask(meter: MetricRecorder, name: str, mask: Tensor, batch: LossBatch) -> None:
    """Measure the share of tokens under a mask, bool [n], and of samples with such a token."""
    meter.set_mean(f"{name}_fraction", mask)
    of_samples = segment_sum(mask.float(), batch.sample, batch.token_counts) > 0
    meter.set_mean(f"{name}_sample_fraction", of_samples, "samples")


def measure_kl(meter: MetricRecorder, area: str, logprobs: Tensor, other: Tensor) -> None:
    """Measure KL(policy || other) of the policy's samples, [n]; fp32 could not resolve a small
    k3."""
    difference = (other - logprobs).double()
    meter.set_mean(f"{area}/k1", -difference)
    meter.set_mean(f"{area}/k3", torch.expm1(bounded(difference)) - difference)


def measure_move(meter: MetricRecorder, area: str, log_diff: Tensor, advantages: Tensor) -> None:
    """Measure the old policy against the new one, and by how much right and wrong answers became
    likelier, which falls below 0 for right ones in lazy likelihood displacement (arXiv:2512.04220).
    log_diff: [n], new less old."""
    meter.set_mean(f"{area}/k1", -log_diff)
    meter.set_mean(f"{area}/k2", log_diff**2 / 2)
    meter.set_mean(f"{area}/logprob_gain_positive", log_diff, where=advantages > 0)
    meter.set_mean(f"{area}/logprob_gain_negative", log_diff, where=advantages < 0)


def derived(metrics: dict[str, float]) -> dict[str, float]:
    """Put effective sample sizes `(sum w)^2 / (n sum w^2)` in the place of the means of w^2."""
    for name in list(metrics):
        if not name.partition("@")[0].endswith("/square"):
            continue
        mean = metrics[name.replace("/square", "/mean")]
        square = metrics.pop(name)
        fraction = 0.0
        if square > 0:
            fraction = mean**2 / square
        metrics[name.replace("/square", "/ess_fraction")] = fraction
    return metrics


def _mismatch(meter: MetricRecorder, batch: LossBatch) -> None:
    """Measure how far trainer and engine are apart on the same tokens, from the engine's samples:
    k1 and k3 estimate KL(engine || trainer), chi2 is `E[rho^2] - 1`."""
    measure_kl(meter, "mismatch", batch.rollout_logprobs, batch.old_logprobs.detach())
    difference = (batch.old_logprobs.detach() - batch.rollout_logprobs).double()
    rho = bounded(difference).exp()
    meter.set_mean("mismatch/abs_mean", difference.abs())
    meter.set_maximum("mismatch/abs_max", difference.abs())
    meter.set_mean("mismatch/exp_abs_mean", bounded(difference.abs()).exp())
    meter.set_mean("mismatch/chi2", rho**2 - 1)
    meter.set_mean("mismatch/rho/mean", rho)
    meter.set_mean("mismatch/rho/square", rho**2)
