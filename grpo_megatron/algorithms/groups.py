"""Statistics within groups and within scopes (a domain, or the whole batch).

Shape legend: N samples; `ids` int64 [N] names the group of each. Only samples with `valid` count.
"""

import torch
from torch import Tensor

ZERO_VARIANCE = 1e-8
"""Groups whose rewards differ by no more have no signal (a test on rewards, not on deviations)."""


class Groups:
    """Sums, means and deviations of sample values, broadcast back to the samples ([N])."""

    def __init__(self, ids: Tensor, valid: Tensor):
        self.ids, self.valid = ids, valid
        self.size = int(ids.max()) + 1 if len(ids) else 0
        self.count = self._total(valid.double())[ids]

    def sum(self, values: Tensor) -> Tensor:
        return self._total(torch.where(self.valid, values, 0.0))[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.count.clamp(min=1)

    def centred(self, values: Tensor) -> Tensor:
        """`x - mean`; exactly 0 where invalid and where the group has no spread."""
        live = self.valid & (self.spread(values) > ZERO_VARIANCE)
        return torch.where(live, values - self.mean(values), 0.0)

    def standardised(self, values: Tensor, kind: str, eps: float) -> Tensor:
        """`(x - mean) / (std + eps)`, 0 where `centred` is 0."""
        centred = self.centred(values)
        std = self.std(values, kind) + eps
        return torch.where(centred == 0, 0.0, centred / torch.where(std > 0, std, 1.0))

    def std(self, values: Tensor, kind: str) -> Tensor:
        """`kind`: sample (n-1) or population (n); 0 where it is undefined."""
        squares = self.sum(torch.where(self.valid, values - self.mean(values), 0.0) ** 2)
        return (squares / (self.count - int(kind == "sample")).clamp(min=1)).sqrt()

    def spread(self, values: Tensor) -> Tensor:
        """max - min; 0 for a group without valid samples."""
        return torch.nan_to_num(self.max(values) - self.min(values), nan=0.0, neginf=0.0)

    def max(self, values: Tensor) -> Tensor:
        return self._extreme(values, -torch.inf, "amax")

    def min(self, values: Tensor) -> Tensor:
        return self._extreme(values, torch.inf, "amin")

    def rank(self, keys: Tensor, sample_ids: Tensor) -> Tensor:
        """Place by ascending key within the group, int64 [N]; ties by sample id, invalid last."""
        order = torch.argsort(sample_ids, stable=True)
        for key in (keys, ~self.valid, self.ids):
            order = order[torch.argsort(key[order], stable=True)]
        sizes = torch.bincount(self.ids, minlength=self.size)
        places = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[self.ids[order]]
        return torch.empty_like(places).scatter(0, order, places)

    def _total(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.size).index_add(0, self.ids, values)

    def _extreme(self, values: Tensor, fill: float, how: str) -> Tensor:
        start = values.new_full((self.size,), fill)
        kept = torch.where(self.valid, values, fill)
        return start.scatter_reduce(0, self.ids, kept, how)[self.ids]
