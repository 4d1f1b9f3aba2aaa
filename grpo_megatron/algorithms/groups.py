"""Statistics of samples within their groups, and work on whole groups of tokens.

Shape legend: N samples in Q groups; n policy tokens of all samples, flat. Ties are broken by
`sample_ids`, so the order of the samples does not matter."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import SampleBatch

ZERO_VARIANCE = 1e-8
"""Groups whose rewards differ by no more have no signal (a test on rewards, not on deviations)."""
ROUNDING = 1e-12
"""Share of its terms up to which a difference in float64 is one of rounding."""
ROUNDING_OF_FLOAT32 = 2.5e-7
"""The same of what tokens have in float32: four units of its last place."""


def without_rounding(differences: Tensor, terms: Tensor) -> Tensor:
    """Return the differences, exactly 0 where they are no more than the rounding of their terms.

    terms: the largest magnitude that was added or subtracted, in the shape of the differences.
    Masks and regularisers go by the sign of an advantage, which rounding must not decide: a reward
    that equals its group's mean has none, whatever the scale of the rewards."""
    share = ROUNDING_OF_FLOAT32
    if differences.dtype == torch.float64:
        share = ROUNDING
    return torch.where(differences.abs() <= share * terms, 0.0, differences)


class Groups:
    """Statistics of sample values within groups or scopes, broadcast back to the samples ([N]).

    `ids`, int64 [N], names the group of each sample; only samples with `valid`, bool [N], count."""

    def __init__(self, ids: Tensor, valid: Tensor):
        self.ids = ids
        self.valid = valid
        self.size = int(ids.max()) + 1 if len(ids) else 0
        self.count = self.sum(valid.double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each sample's group, [N]; 0 for a group without valid samples."""
        counted = torch.where(self.valid, values, 0.0)
        return counted.new_zeros(self.size).index_add(0, self.ids, counted)[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each sample's group, [N]; 0 for a group without valid samples."""
        return self.sum(values) / self.count.clamp(min=1)

    def std(self, values: Tensor, kind: str) -> Tensor:
        """Return the deviation in each sample's group, [N]; 0 where it is undefined.

        kind: "sample" divides by one less than the number of samples, "population" by it."""
        centred = values - self.mean(values)
        squares = self.sum(centred**2)
        return (squares / (self.count - int(kind == "sample")).clamp(min=1)).sqrt()

    def centred(self, values: Tensor) -> Tensor:
        """`x - mean`, [N]; exactly 0 where invalid, where the group has no spread, and where x is
        the mean but for rounding."""
        return self.beside(values, self.mean(values))

    def beside(self, values: Tensor, baseline: Tensor) -> Tensor:
        """`x - baseline`, [N], with a baseline of the group's values, [N]; 0 where `centred` is."""
        has_signal = self.valid & (self.spread(values) > ZERO_VARIANCE)
        differences = torch.where(has_signal, values - baseline, 0.0)
        return without_rounding(differences, self.largest(values))

    def standardised(self, values: Tensor, kind: str, eps: float) -> Tensor:
        """`(x - mean) / (std + eps)`, [N]; 0 where `centred` is 0. kind: of the deviation."""
        centred = self.centred(values)
        std = self.std(values, kind) + eps
        return torch.where(centred == 0, 0.0, centred / std)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest magnitude in each sample's group, [N]; 0 without valid samples."""
        return self.max(values.abs()).clamp(min=0)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each sample's group, [N]; minus infinity without valid
        samples."""
        start = values.new_full((self.size,), -torch.inf)
        counted = torch.where(self.valid, values, -torch.inf)
        return start.scatter_reduce(0, self.ids, counted, "amax")[self.ids]

    def min(self, values: Tensor) -> Tensor:
        """Return the smallest value of each sample's group, [N]; infinity without valid samples."""
        return -self.max(-values)

    def spread(self, values: Tensor) -> Tensor:
        """`max - min` in each sample's group, [N]; 0 for a group without valid samples.

        Raises ValueError where the value of a valid sample is NaN: its group would pass for one
        in which all are equal."""
        if bool((self.valid & torch.isnan(values)).any()):
            raise ValueError("a sample that counts has the value NaN")
        return (self.max(values) - self.min(values)).clamp(min=0)

    def rank(self, keys: Tensor, sample_ids: Tensor) -> Tensor:
        """Place by ascending key within the group, int64 [N]; ties by sample id, invalid last."""
        order = torch.from_numpy(np.lexsort((sample_ids, keys, ~self.valid, self.ids)))
        sizes = torch.bincount(self.ids, minlength=self.size)
        first_places = sizes.cumsum(0) - sizes
        places = torch.arange(len(order)) - first_places[self.ids[order]]
        return torch.empty_like(places).scatter(0, order, places)


def by_groups(batch: SampleBatch, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Call `function` on whole groups, about `CHUNK_TOKENS` tokens at a time; join the results.

    `function(part, *columns)` gets a sub-batch, with token columns in float64, and the rows of
    `columns` ([N] each) for its samples; it returns [n of part]. Returns [n] in the order of
    `batch`, in the dtype of its first floating token column; fp32 where it has none."""
    dtype = torch.float32
    for column in batch.tokens.values():
        if column.is_floating_point():
            dtype = column.dtype
            break
    joined = torch.empty(batch.num_tokens, dtype=dtype)
    for rows in batch.group_chunks():
        own = [column[rows] for column in columns]
        joined[batch.flat_index(rows)] = function(batch.subset(rows), *own).to(dtype)
    return joined


def prefix_sums(values: Tensor, batch: SampleBatch) -> Tensor:
    """Sum over the tokens of the same sample up to each token, itself included, [n] -> [n]."""
    running = values.cumsum(0)
    starts = torch.cat([running.new_zeros(1), running])[batch.offsets[:-1]]
    return running - batch.to_tokens(starts)


def suffix_sums(values: Tensor, batch: SampleBatch) -> Tensor:
    """Sum over the tokens of the same sample from each token on, [n] -> [n]."""
    running = values.cumsum(0)
    ends = torch.cat([running.new_zeros(1), running])[batch.offsets[1:]]
    return batch.to_tokens(ends) - running + values
