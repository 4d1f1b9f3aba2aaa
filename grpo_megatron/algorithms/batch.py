"""Samples of one rollout batch, as estimators see them, and statistics within groups.

Shape legend: N samples in Q groups and D domains; n policy tokens of all samples, flat, sample
after sample; `token_counts` sums to n. Ties are broken by `sample_ids`: no order matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 65_536
"""Token-level estimators work on whole groups of about this many tokens at a time."""
ZERO_VARIANCE = 1e-8
"""Groups whose rewards differ by no more have no signal (a test on rewards, not on deviations)."""


@dataclass(frozen=True)
class Events:
    """Rewards inside samples: steps of a solution, or turns of an agent."""

    sample: Tensor  # int64 [K]
    end: Tensor  # int64 [K], last policy token of the step or turn
    reward: Tensor  # float64 [K]
    state: Tensor | None = None  # int64 [K], equal numbers: the same environment state

    def __getitem__(self, which: Tensor) -> Events:
        state = None if self.state is None else self.state[which]
        return Events(self.sample[which], self.end[which], self.reward[which], state)


@dataclass(frozen=True)
class DroppedRewards:
    """Rewards of the groups that were sampled for a step and not kept (`sampling.dynamic`,
    `sampling.zero_variance`)."""

    rewards: Tensor  # float64 [M], none of them NaN
    domains: Tensor  # int64 [M], 0..D-1


@dataclass(frozen=True)
class SampleBatch:
    """Rewards, lengths and, where an estimator needs them, token columns."""

    rewards: Tensor  # float64 [N]; NaN: unscorable
    group_ids: Tensor  # int64 [N], 0..Q-1
    token_counts: Tensor  # int64 [N]
    sample_ids: Tensor  # int64 [N], unique
    domains: Tensor  # int64 [N], 0..D-1
    trained: Tensor  # bool [N]; False: in the statistics, but not in the loss
    components: Mapping[str, Tensor] = field(default_factory=dict)  # float64 [N]; NaN: skipped
    component_weights: Mapping[str, Tensor] = field(default_factory=dict)  # float64 [N]
    correct: Tensor | None = None
    """bool [N]: the domain's accuracy component says so; None: rewards are all that is known"""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """[n]: token_ids, old_logprobs, ref_logprobs, entropies (of the old policy)"""
    events: Events | None = None
    dropped: DroppedRewards | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [N+1], first token of every sample."""
        return torch.cat([self.token_counts.new_zeros(1), self.token_counts.cumsum(0)])

    @cached_property
    def valid(self) -> Tensor:
        """bool [N]: has a reward."""
        return ~torch.isnan(self.rewards)

    def is_correct(self, threshold: float) -> Tensor:
        """Which samples are correct, bool [N]: what the accuracy component said, where it is
        known; else those whose reward is at least `threshold` (`objective.correct_threshold`)."""
        if self.correct is not None:
            return self.correct
        return self.rewards >= threshold

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def spread(self, values: Tensor) -> Tensor:
        """[N] -> [n]."""
        return values.repeat_interleave(self.token_counts)

    def scopes(self, kind: str) -> Tensor:
        """int64 [N]: the domain if `kind` is "domain", else 0 for all, which couples domains."""
        return self.domains if kind == "domain" else torch.zeros_like(self.domains)

    def positions(self) -> Tensor:
        """int64 [n], 0..T_i-1."""
        return torch.arange(self.num_tokens, device=self.offsets.device) - self.spread(
            self.offsets[:-1]
        )

    def positions_from_end(self) -> Tensor:
        """int64 [n], T_i-1..0."""
        return self.spread(self.token_counts) - 1 - self.positions()

    def sums(self, values: Tensor) -> Tensor:
        """[n] -> [N], the sum of every sample's tokens."""
        if not len(self):
            return values.new_zeros(0)
        return torch.segment_reduce(values, "sum", lengths=self.token_counts, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """[n] -> [N], the mean of every sample's tokens; 0 for an empty one."""
        return self.sums(values) / self.token_counts.clamp(min=1)

    def flat_index(self, rows: Tensor) -> Tensor:
        """Positions in the flat columns of the tokens of `rows` (int64), in their order."""
        counts = self.token_counts[rows]
        starts = self.offsets[rows] - (counts.cumsum(0) - counts)
        return torch.arange(int(counts.sum()), device=counts.device) + starts.repeat_interleave(
            counts
        )

    def without_truncated(self, truncated: Tensor, how: str) -> SampleBatch:
        """Overlong filter. truncated: bool [N]; how: `objective.overlong`."""
        if how == "none":
            return self
        rewards = torch.where(truncated, torch.nan, self.rewards) if how == "drop" else self.rewards
        return replace(self, trained=self.trained & ~truncated, rewards=rewards)

    def subset(self, rows: Tensor) -> SampleBatch:
        """The samples `rows` (int64), with token columns in float64 and groups renumbered."""
        _, group_ids = torch.unique(self.group_ids[rows], return_inverse=True)
        correct = None if self.correct is None else self.correct[rows]
        events = None if self.events is None else _events_of(self.events, rows, len(self))
        return replace(
            self,
            rewards=self.rewards[rows],
            group_ids=group_ids,
            token_counts=self.token_counts[rows],
            sample_ids=self.sample_ids[rows],
            domains=self.domains[rows],
            trained=self.trained[rows],
            components=_rows_of(self.components, rows),
            component_weights=_rows_of(self.component_weights, rows),
            correct=correct,
            tokens=self._token_columns(rows),
            events=events,
        )

    def _token_columns(self, rows: Tensor) -> dict[str, Tensor]:
        """Token columns of the samples `rows`, floating ones in float64."""
        if not self.tokens:
            return {}
        index = self.flat_index(rows)
        columns = {}
        for name, column in self.tokens.items():
            values = column[index]
            columns[name] = values.double() if values.is_floating_point() else values
        return columns

    def group_chunks(self) -> Iterator[Tensor]:
        """Rows (int64) of whole groups, about `CHUNK_TOKENS` tokens at a time."""
        order = torch.argsort(self.group_ids, stable=True)
        sizes = torch.bincount(self.group_ids, self.token_counts).long()
        chunks = ((sizes.cumsum(0) - sizes) // CHUNK_TOKENS)[self.group_ids[order]]
        _, counts = torch.unique_consecutive(chunks, return_counts=True)
        yield from order.split(counts.tolist())


class Groups:
    """Statistics of sample values within groups or scopes, broadcast back to the samples ([N]).
    `ids`, int64 [N], names the group of each; only samples with `valid` count."""

    def __init__(self, ids: Tensor, valid: Tensor):
        self.ids = ids
        self.valid = valid
        self.size = int(ids.max()) + 1 if len(ids) else 0
        self.count = self.sum(valid.double())

    def sum(self, values: Tensor) -> Tensor:
        counted = torch.where(self.valid, values, 0.0)
        return counted.new_zeros(self.size).index_add(0, self.ids, counted)[self.ids]

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
        start = values.new_full((self.size,), -torch.inf)
        counted = torch.where(self.valid, values, -torch.inf)
        return start.scatter_reduce(0, self.ids, counted, "amax")[self.ids]

    def min(self, values: Tensor) -> Tensor:
        return -self.max(-values)

    def rank(self, keys: Tensor, sample_ids: Tensor) -> Tensor:
        """Place by ascending key within the group, int64 [N]; ties by sample id, invalid last."""
        order = torch.from_numpy(np.lexsort((sample_ids, keys, ~self.valid, self.ids)))
        sizes = torch.bincount(self.ids, minlength=self.size)
        places = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[self.ids[order]]
        return torch.empty_like(places).scatter(0, order, places)


@dataclass(frozen=True)
class LossBatch:
    """What an objective may look at: n policy tokens of the S samples in one micro-batch, flat,
    prompt and padding left out; log-probs at the sampling temperature. All on one device."""

    logprobs: Tensor  # [n] with gradient
    old_logprobs: Tensor  # [n] proximal policy
    rollout_logprobs: Tensor  # [n] behaviour policy, as the engine reported
    entropies: Tensor  # [n] of the current policy, with gradient
    advantages: Tensor  # [n]
    weights: Tensor  # [n] aggregation weight, holds the global denominators
    sample: Tensor  # int64 [n], 0..S-1
    token_counts: Tensor  # int64 [S]
    domain: Tensor  # int64 [S], 0..D-1
    untruncated_logprobs: Tensor  # [n] with gradient; like `logprobs` unless sampling truncates
    ref_logprobs: Tensor | None = None  # [n], not truncated either
    turn: Tensor | None = None  # int64 [n], 0..: the turn of each token (GAGPO)
    weight_slopes: Tensor | None = None  # [n], by the exponent of lambda_grpo
    preference: Tensor | None = None  # [2, S]: coefficient of the margin, loss
    decisions: Mapping[str, Tensor] | None = None
    """Who was clipped or rejected, bool [n] by name: followed, as rounding may decide otherwise."""


def suffix_sums(values: Tensor, batch: SampleBatch) -> Tensor:
    """[n] -> [n]: sum over the tokens of the same sample from each token on."""
    running = values.cumsum(0)
    ends = torch.cat([running.new_zeros(1), running])[batch.offsets[1:]]
    return batch.spread(ends) - running + values


def by_groups(batch: SampleBatch, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Call `function` on whole groups, about CHUNK_TOKENS tokens at a time, and put the results
    together. `function(part, *columns)` gets a sub-batch, with token columns in float64, and the
    rows of `columns` ([N] each) for its samples; it returns [n of part]. Returns [n] in the order
    of `batch`, in the dtype of its first floating token column; fp32 where it has none."""
    floats = [c.dtype for c in batch.tokens.values() if c.is_floating_point()]
    out = torch.empty(batch.num_tokens, dtype=(*floats, torch.float32)[0])
    for rows in batch.group_chunks():
        own = [column[rows] for column in columns]
        out[batch.flat_index(rows)] = function(batch.subset(rows), *own).to(out.dtype)
    return out


def _rows_of(columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in columns.items()}


def _events_of(events: Events, rows: Tensor, num_samples: int) -> Events:
    new = torch.full((num_samples,), -1, dtype=torch.int64)
    new[rows] = torch.arange(len(rows))
    inside = events[new[events.sample] >= 0]
    return replace(inside, sample=new[inside.sample])
