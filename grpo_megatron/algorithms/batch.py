"""Samples of one rollout batch, as estimators see them.

Shape legend: N samples in Q groups and D domains; n policy tokens of all samples, flat, sample
after sample; `token_counts` sums to n. Nothing here depends on the order of the samples: ties
are broken by `sample_ids`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

CHUNK_TOKENS = 65_536
"""Token-level estimators work on whole groups of about this many tokens at a time."""


@dataclass(frozen=True)
class Events:
    """Rewards inside samples: steps of a solution, or turns of an agent."""

    sample: Tensor  # int64 [K]
    end: Tensor  # int64 [K], last policy token of the step or turn
    reward: Tensor  # float64 [K]
    state: Tensor | None = None  # int64 [K], equal numbers: the same environment state


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
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """[n]: token_ids, old_logprobs, ref_logprobs, entropies (of the old policy)"""
    events: Events | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @cached_property
    def num_groups(self) -> int:
        return int(self.group_ids.max()) + 1 if len(self) else 0

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [N+1], first token of every sample."""
        return torch.cat([self.token_counts.new_zeros(1), self.token_counts.cumsum(0)])

    @cached_property
    def valid(self) -> Tensor:
        """bool [N]: has a reward."""
        return ~torch.isnan(self.rewards)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def spread(self, values: Tensor) -> Tensor:
        """[N] -> [n]."""
        return values.repeat_interleave(self.token_counts)


    def positions(self) -> Tensor:
        """int64 [n], 0..T_i-1."""
        return torch.arange(self.num_tokens, device=self.offsets.device) - self.spread(
            self.offsets[:-1])

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
            counts)

    def without_truncated(self, truncated: Tensor, how: str) -> SampleBatch:
        """Overlong filter. truncated: bool [N]; how: `objective.overlong`."""
        if how == "none":
            return self
        rewards = self.rewards
        if how == "drop":
            rewards = torch.where(truncated, torch.nan, rewards)
        return replace(self, trained=self.trained & ~truncated, rewards=rewards)

    def subset(self, rows: Tensor) -> SampleBatch:
        """The samples `rows` (int64), with token columns in float64 and groups renumbered."""
        index = self.flat_index(rows) if self.tokens else None
        columns = {name: column[index] for name, column in self.tokens.items()}
        columns = {name: c.double() if c.is_floating_point() else c for name, c in columns.items()}
        return replace(
            self, rewards=self.rewards[rows], token_counts=self.token_counts[rows],
            group_ids=torch.unique(self.group_ids[rows], return_inverse=True)[1],
            sample_ids=self.sample_ids[rows], domains=self.domains[rows],
            trained=self.trained[rows], tokens=columns,
            components={name: c[rows] for name, c in self.components.items()},
            component_weights={name: c[rows] for name, c in self.component_weights.items()},
            events=_events_of(self.events, rows, len(self)))

    def group_chunks(self) -> Iterator[Tensor]:
        """Rows (int64) of whole groups, about `CHUNK_TOKENS` tokens at a time."""
        order = torch.argsort(self.group_ids, stable=True)
        sizes = self.token_counts.new_zeros(self.num_groups).index_add(
            0, self.group_ids, self.token_counts)
        chunk_of_group = (sizes.cumsum(0) - sizes) // CHUNK_TOKENS
        chunks = chunk_of_group[self.group_ids[order]]
        _, counts = torch.unique_consecutive(chunks, return_counts=True)
        yield from order.split(counts.tolist())


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
    """Who was clipped or rejected when this batch was trained, bool [n] by name: to be followed,
    because rounding decides otherwise at a bound."""


def suffix_sums(values: Tensor, batch: SampleBatch) -> Tensor:
    """[n] -> [n]: sum over the tokens of the same sample from each token on."""
    running = values.cumsum(0)
    ends = torch.cat([running.new_zeros(1), running])[batch.offsets[1:]]
    return batch.spread(ends) - running + values


def by_groups(batch: SampleBatch, function) -> Tensor:
    """Apply `function(part) -> [n of part]`, local to groups, chunk by chunk; float64 -> [n]."""
    floats = [c.dtype for c in batch.tokens.values() if c.is_floating_point()]
    out = torch.empty(batch.num_tokens, dtype=(*floats, torch.float32)[0])
    for rows in batch.group_chunks():
        out[batch.flat_index(rows)] = function(batch.subset(rows)).to(out.dtype)
    return out


def _events_of(events: Events | None, rows: Tensor, num_samples: int) -> Events | None:
    if events is None:
        return None
    new = torch.full((num_samples,), -1, dtype=torch.int64)
    new[rows] = torch.arange(len(rows))
    sample = new[events.sample]
    inside = sample >= 0
    state = None if events.state is None else events.state[inside]
    return Events(sample[inside], events.end[inside], events.reward[inside], state)
