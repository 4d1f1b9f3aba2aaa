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
    """Sums and maxima by name. `means[name]` is a tensor [2]: (sum, count)."""

    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    """Values that are kept one by one, [S] each."""
    units: dict[str, str] = field(default_factory=dict)
    """What a metric is normalised by: tokens, samples, weight, or sum and max for neither."""
    decisions: dict[str, Tensor] = field(default_factory=dict)
    """Which tokens were clipped or rejected, bool [n] of this micro-batch; never added up."""

    def mean(self, name: str, total: Tensor, count: Tensor | float, unit: str = "tokens") -> None:
        total = total.detach().double()
        count = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        self.means[name], self.units[name] = torch.stack([total, count]), unit

    def maximum(self, name: str, values: Tensor) -> None:
        values = values.detach().double()
        self.maxima[name] = values.max() if values.numel() else values.new_tensor(-torch.inf)
        self.units[name] = "max"

    def add(self, other: Self) -> None:
        self.units |= other.units
        for mine, theirs, join in (
            (self.means, other.means, torch.add),
            (self.maxima, other.maxima, torch.maximum),
            (self.samples, other.samples, lambda *both: torch.cat(both)),
        ):
            for name, value in theirs.items():
                mine[name] = join(mine[name], value) if name in mine else value

    def result(self) -> dict[str, float]:
        """Sums (unit "sum") as they are; what nothing was counted for is left out."""
        out = {
            name: float(total if self.units.get(name) == "sum" else total / count)
            for name, (total, count) in self.means.items()
            if count > 0 or self.units.get(name) == "sum"
        }
        return out | {
            name: float(value) for name, value in self.maxima.items() if value > -torch.inf
        }


class MetricRecorder:
    """Fills a `Stats` with values per token or per sample of one micro-batch; by domain too where
    there are several. token_domain, sample_domain: int64 [n] and [S]."""

    def __init__(self, token_domain: Tensor | None, sample_domain: Tensor, domains: Sequence[str]):
        self.stats = Stats()
        self._domain = {"tokens": token_domain, "samples": sample_domain}
        self._domains = domains if len(domains) > 1 else ()

    def mean(
        self, name: str, values: Tensor, unit: str = "tokens", where: Tensor | None = None
    ) -> None:
        """Mean of `values` ([n] or [S] by unit), of those with `where` only."""
        values = values.detach().double()
        counts = torch.ones_like(values) if where is None else where.double()
        values = values if where is None else torch.where(where, values, 0.0)
        self.stats.mean(name, values.sum(), counts.sum(), unit)
        domain = self._domain[unit]
        for number, label in enumerate(self._domains):
            here = domain == number
            self.stats.mean(f"{name}@{label}", values[here].sum(), counts[here].sum(), unit)

    def maximum(self, name: str, values: Tensor) -> None:
        self.stats.maximum(name, values)
        for number, label in enumerate(self._domains):
            self.stats.maximum(f"{name}@{label}", values[self._domain["tokens"] == number])


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
    """Fill `meter`. ratio, log_diff, factor of the surrogate term: [n], detached; masks: bool."""
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
        measure_kl(meter, "reference", batch.untruncated_logprobs.detach(), batch.ref_logprobs)


def measure_kl(meter: MetricRecorder, area: str, logprobs: Tensor, other: Tensor) -> None:
    """KL(policy || other) of the policy's samples, [n]; fp32 could not resolve a small k3."""
    difference = (other - logprobs).double()
    meter.mean(f"{area}/k1", -difference)
    meter.mean(f"{area}/k3", torch.expm1(bounded(difference)) - difference)


def measure_move(meter: MetricRecorder, area: str, log_diff: Tensor, advantages: Tensor) -> None:
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
        metrics[name.replace("/square", "/ess_fraction")] = mean**2 / square if square > 0 else 0.0
    return metrics


def _mismatch(meter: MetricRecorder, batch: LossBatch) -> None:
    """How far trainer and engine are apart on the same tokens, from the engine's samples:
    k1 and k3 estimate KL(engine || trainer), chi2 is `E[rho^2] - 1`."""
    measure_kl(meter, "mismatch", batch.rollout_logprobs, batch.old_logprobs.detach())
    difference = (batch.old_logprobs.detach() - batch.rollout_logprobs).double()
    rho = bounded(difference).exp()
    meter.mean("mismatch/abs_mean", difference.abs())
    meter.maximum("mismatch/abs_max", difference.abs())
    meter.mean("mismatch/exp_abs_mean", bounded(difference.abs()).exp())
    meter.mean("mismatch/chi2", rho**2 - 1)
    meter.mean("mismatch/rho/mean", rho)
    meter.mean("mismatch/rho/square", rho**2)
