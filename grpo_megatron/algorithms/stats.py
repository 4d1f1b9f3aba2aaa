"""Metrics that stay exact when they are added over micro-batches and ranks.

A mean is carried as (sum, count), a maximum as itself; they become numbers only at the end.
With several domains every one also exists as `name@domain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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

    def add(self, other: Stats) -> None:
        """Accumulate another micro-batch."""
        self.units |= other.units
        for mine, theirs, join in ((self.means, other.means, torch.add),
                                   (self.maxima, other.maxima, torch.maximum),
                                   (self.samples, other.samples, lambda *both: torch.cat(both))):
            for name, value in theirs.items():
                mine[name] = join(mine[name], value) if name in mine else value

    def result(self) -> dict[str, float]:
        """Sums (unit "sum") as they are; what nothing was counted for is left out."""
        out = {name: float(pair[0]) if self.units.get(name) == "sum" else float(pair[0] / pair[1])
               for name, pair in self.means.items()
               if pair[1] > 0 or self.units.get(name) == "sum"}
        return out | {name: float(value) for name, value in self.maxima.items()
                      if value > -torch.inf}


class Meter:
    """Fills a `Stats` with values per token or per sample of one micro-batch; by domain too where
    there are several. token_domain, sample_domain: int64 [n] and [S]."""

    def __init__(self, token_domain: Tensor | None, sample_domain: Tensor, domains: Sequence[str]):
        self.stats = Stats()
        self._domain = {"tokens": token_domain, "samples": sample_domain}
        self._domains = domains if len(domains) > 1 else ()

    def mean(self, name: str, values: Tensor, unit: str = "tokens",
             where: Tensor | None = None) -> None:
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
