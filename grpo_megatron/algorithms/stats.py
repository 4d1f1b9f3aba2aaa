"""Metrics that stay exact when they are added over micro-batches and ranks.

A mean is carried as (sum, count), a maximum as itself; they become numbers only at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Stats:
    """Sums and maxima by name. `means[name]` is a tensor [2]: (sum, count)."""

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    def mean(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        total = total.detach().double()
        count = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        self.means[name] = torch.stack([total, count])

    def maximum(self, name: str, values: torch.Tensor) -> None:
        values = values.detach().double()
        self.maxima[name] = values.max() if values.numel() else values.new_tensor(-torch.inf)

    def add(self, other: Stats) -> None:
        """Accumulate another micro-batch."""
        for name, pair in other.means.items():
            self.means[name] = self.means[name] + pair if name in self.means else pair
        for name, value in other.maxima.items():
            old = self.maxima.get(name)
            self.maxima[name] = value if old is None else torch.maximum(old, value)

    def result(self) -> dict[str, float]:
        """NaN where nothing was counted."""
        out = {n: float(p[0] / p[1]) if p[1] > 0 else float("nan") for n, p in self.means.items()}
        return out | {n: float(v) if v > -torch.inf else float("nan")
                      for n, v in self.maxima.items()}
