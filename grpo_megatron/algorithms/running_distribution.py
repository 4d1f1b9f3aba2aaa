"""The distribution of a number over all steps of a run, small enough for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_VALUES = 512
"""Different values that are told apart. Success rates of groups of G binary rewards have G + 1."""


@dataclass(frozen=True)
class RunningDistribution:
    """Values with how often each was seen. Exact for up to `MAX_VALUES` different ones; then
    neighbours are merged into bins of about equal counts, as a digest of quantiles does."""

    values: np.ndarray  # float64 [K], ascending
    counts: np.ndarray  # int64 [K]

    @classmethod
    def from_state(cls, state: Sequence[Sequence[float]]) -> RunningDistribution:
        """Restore what `state` returned; an empty list: nothing was seen yet."""
        pairs = np.asarray(state, np.float64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1].astype(np.int64))

    @property
    def state(self) -> list[list[float]]:
        """`[value, count]` of each, ready for JSON."""
        return [
            [float(value), int(count)]
            for value, count in zip(self.values, self.counts, strict=True)
        ]

    def with_values(self, new: np.ndarray) -> RunningDistribution:
        """Return the distribution after seeing `new` too, float64 [M]."""
        every_value = np.concatenate([self.values, new])
        every_count = np.concatenate([self.counts, np.ones(len(new), np.int64)])
        values, place = np.unique(every_value, return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, place, every_count)
        joined = RunningDistribution(values, counts)
        if len(values) > MAX_VALUES:
            return joined._merged(MAX_VALUES // 2)
        return joined

    def quantile(self, q: float) -> float:
        """Interpolate linearly between the two nearest values, as `numpy.quantile` does; NaN of
        nothing. q: in [0, 1]."""
        total = int(self.counts.sum())
        if total == 0:
            return float("nan")
        place = q * (total - 1)
        lower = int(np.floor(place))
        upper = int(np.ceil(place))
        ends = self.counts.cumsum()
        below = self.values[np.searchsorted(ends, lower, side="right")]
        above = self.values[np.searchsorted(ends, upper, side="right")]
        return float(below + (above - below) * (place - lower))

    def _merged(self, num_bins: int) -> RunningDistribution:
        """Return the distribution in at most `num_bins` bins, each at its mean value."""
        middles = self.counts.cumsum() - self.counts / 2
        bin_of = (middles * num_bins / self.counts.sum()).astype(np.int64)
        _, place = np.unique(bin_of, return_inverse=True)
        counts = np.zeros(place[-1] + 1, np.int64)
        sums = np.zeros(place[-1] + 1, np.float64)
        np.add.at(counts, place, self.counts)
        np.add.at(sums, place, self.values * self.counts)
        return RunningDistribution(sums / counts, counts)
