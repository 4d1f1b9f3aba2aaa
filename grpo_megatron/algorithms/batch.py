"""The tensors of an objective, from recorded samples to the loss of a micro-batch.

`SampleBatch -> Advantages -> LossConstants -> LossBatch -> ClipInputs`; `grpo_megatron.types` shows
the whole chain with an example.

Shape legend: N samples in Q groups and D domains; S of them in a micro-batch; n policy tokens of
these samples, flat, sample after sample; `token_counts` sums to n."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from grpo_megatron.device_copies import to_device
from grpo_megatron.types import Turn

CHUNK_TOKENS = 65_536
"""Token-level estimators work on whole groups of about this many tokens at a time."""


# --- samples of a step


@dataclass(frozen=True)
class Events:
    """Rewards inside samples: steps of a solution, or turns of an agent. K of them."""

    sample: Tensor  # int64 [K]
    end: Tensor  # int64 [K], last policy token of the step or turn
    reward: Tensor  # float64 [K]; NaN: a step or turn without one
    state: Tensor | None = None
    """int64 [K], of turns; equal numbers: the same environment state. One that is not known is
    none of the others."""

    def __getitem__(self, which: Tensor) -> Events:
        state = self.state
        if state is not None:
            state = state[which]
        return Events(self.sample[which], self.end[which], self.reward[which], state)


Sequences = Sequence[tuple[Sequence[Turn], int]]
"""Of a sample's sequences, their turns, and how many tokens their responses have."""


def turn_events(samples: Sequence[Sequences]) -> Events:
    """Return the turns of samples, as places among their policy tokens.

    A sequence without turns is one turn; one without tokens is none."""
    sample_of: list[int] = []
    ends: list[int] = []
    rewards: list[float] = []
    states: list[int] = []
    number_of: dict[str, int] = {}
    num_states = 0
    for sample, sequences in enumerate(samples):
        num_tokens = 0
        for turn in _turns_with_tokens(sequences):
            num_tokens += turn.end - turn.start
            state = num_states
            if turn.state:
                state = number_of.setdefault(turn.state, num_states)
            if state == num_states:  # not seen before
                num_states += 1
            sample_of.append(sample)
            ends.append(num_tokens - 1)
            rewards.append(turn.reward)
            states.append(state)
    return Events(
        sample=torch.tensor(sample_of, dtype=torch.int64),
        end=torch.tensor(ends, dtype=torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
        state=torch.tensor(states, dtype=torch.int64),
    )


def _turns_with_tokens(sequences: Sequences) -> Iterator[Turn]:
    """Yield the turns of a sample in order; a sequence without any is one turn."""
    for turns, length in sequences:
        for turn in turns or [Turn(0, length)]:
            if turn.end > turn.start:
                yield turn


@dataclass(frozen=True)
class DroppedRewards:
    """Rewards of the groups that were sampled for a step and not kept (`sampling.dynamic`,
    `sampling.zero_variance`)."""

    rewards: Tensor  # float64 [M], none of them NaN
    domains: Tensor  # int64 [M], 0..D-1


@dataclass(frozen=True)
class SampleBatch:
    """All samples of a recorded step: rewards, lengths and, where an estimator needs them, token
    columns. Advantages are computed from it, on every rank alike."""

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
    """[n]: token_ids, old_logprobs, ref_logprobs, rollout_logprobs; entropies and squared_probs
    (sum over the vocabulary of squared probabilities) of the old policy; sampled_logprobs: as
    old_logprobs, over what could be sampled, as the engine's are; values: of the critic, before
    each token; token_rewards: what tokens earn beside the reward of their sample"""
    events: Events | None = None
    """Rewards of steps, for process supervision."""
    turns: Events | None = None
    """All turns of all samples; None: every sample is one turn of which nothing is known."""
    spoilt: Tensor | None = None
    """bool [n]: tokens that lose their loss, of turns that a tool's failure spoilt or of weights
    that are too old; None: none."""
    dropped: DroppedRewards | None = None
    staleness: Tensor | None = None
    """int64 [n]: by how many weight versions a token is older than what is trained; None: by
    none."""

    def __len__(self) -> int:
        return len(self.rewards)

    # --- samples

    @cached_property
    def valid(self) -> Tensor:
        """bool [N]: has a reward."""
        return ~torch.isnan(self.rewards)

    def is_correct(self, threshold: float) -> Tensor:
        """Return which samples are correct, bool [N]: what the accuracy component said, where it is
        known; else those whose reward is at least `threshold` (`objective.correct_threshold`)."""
        if self.correct is not None:
            return self.correct
        return self.rewards >= threshold

    def scopes(self, kind: str) -> Tensor:
        """int64 [N]: the domain if `kind` is "domain", else 0 for all, which couples domains."""
        if kind == "domain":
            return self.domains
        return torch.zeros_like(self.domains)

    def without_truncated(self, truncated: Tensor, how: str) -> SampleBatch:
        """Overlong filter: leave truncated samples out of the loss, with "drop" out of the
        statistics too. truncated: bool [N]; how: `objective.overlong`."""
        if how == "none":
            return self
        trained = self.trained & ~truncated
        if how != "drop":
            return replace(self, trained=trained)
        rewards = torch.where(truncated, torch.nan, self.rewards)
        return replace(self, trained=trained, rewards=rewards)

    # --- their tokens

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [N+1], first token of every sample."""
        return torch.cat([self.token_counts.new_zeros(1), self.token_counts.cumsum(0)])

    @property
    def num_tokens(self) -> int:
        """n, the policy tokens of all samples."""
        return int(self.offsets[-1])

    def positions(self) -> Tensor:
        """Place of every token in its sample, from the start: int64 [n], 0..T_i-1."""
        every_token = torch.arange(self.num_tokens, device=self.offsets.device)
        return every_token - self.to_tokens(self.offsets[:-1])

    def positions_from_end(self) -> Tensor:
        """Place of every token in its sample, from the end: int64 [n], T_i-1..0."""
        return self.to_tokens(self.token_counts) - 1 - self.positions()

    def to_tokens(self, values: Tensor) -> Tensor:
        """Give every token the value of its sample, [N] -> [n]."""
        return values.repeat_interleave(self.token_counts)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of every sample's tokens, [n] -> [N]."""
        if not len(self):
            return values.new_zeros(0)
        return torch.segment_reduce(values, "sum", lengths=self.token_counts, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of every sample's tokens, [n] -> [N]; 0 for an empty one."""
        return self.sums(values) / self.token_counts.clamp(min=1)

    def largest(self, magnitudes: Tensor) -> Tensor:
        """Return the largest of every sample's tokens, none of them negative, [n] -> [N]; 0 for an
        empty one."""
        if not len(self):
            return magnitudes.new_zeros(0)
        found = torch.segment_reduce(magnitudes, "max", lengths=self.token_counts, unsafe=True)
        return found.clamp(min=0)

    def flat_index(self, rows: Tensor) -> Tensor:
        """Return where the tokens of `rows` (int64 [S]) are in the flat columns, in their order:
        int64 [n of these samples]."""
        counts = self.token_counts[rows]
        starts = self.offsets[rows] - (counts.cumsum(0) - counts)
        every_token = torch.arange(int(counts.sum()), device=counts.device)
        return every_token + starts.repeat_interleave(counts)

    def trajectory_log_ratios(self) -> Tensor:
        """`sum_t (log pi_old - log pi_engine)` of every sample, float64 [N], over what could be
        sampled; tokens with an infinite log-prob count as equal."""
        log_ratio = self.tokens["sampled_logprobs"].double()
        log_ratio = log_ratio - self.tokens["rollout_logprobs"].double()
        return self.sums(torch.where(torch.isfinite(log_ratio), log_ratio, 0.0))

    # --- parts of the batch

    def subset(self, rows: Tensor) -> SampleBatch:
        """Return the samples `rows` (int64), with token columns in float64 and groups
        renumbered."""
        _, group_ids = torch.unique(self.group_ids[rows], return_inverse=True)
        correct = self.correct
        if correct is not None:
            correct = correct[rows]
        spoilt = self.spoilt
        if spoilt is not None:
            spoilt = spoilt[self.flat_index(rows)]
        staleness = self.staleness
        if staleness is not None:
            staleness = staleness[self.flat_index(rows)]
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
            events=_events_of(self.events, rows, len(self)),
            turns=_events_of(self.turns, rows, len(self)),
            spoilt=spoilt,
            staleness=staleness,
        )

    def _token_columns(self, rows: Tensor) -> dict[str, Tensor]:
        """Return token columns of the samples `rows`, floating ones in float64."""
        if not self.tokens:
            return {}
        index = self.flat_index(rows)
        columns = {}
        for name, column in self.tokens.items():
            values = column[index]
            if values.is_floating_point():
                values = values.double()
            columns[name] = values
        return columns

    def group_chunks(self) -> Iterator[Tensor]:
        """Yield the rows of whole groups, about `CHUNK_TOKENS` tokens at a time: int64 [samples of
        the chunk]."""
        order = torch.argsort(self.group_ids, stable=True)
        group_tokens = torch.bincount(self.group_ids, self.token_counts).long()
        first_tokens = group_tokens.cumsum(0) - group_tokens
        chunks = (first_tokens // CHUNK_TOKENS)[self.group_ids[order]]
        _, counts = torch.unique_consecutive(chunks, return_counts=True)
        yield from order.split(counts.tolist())


def _rows_of(columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in columns.items()}


def _events_of(events: Events | None, rows: Tensor, num_samples: int) -> Events | None:
    """Return the events of the samples `rows` (int64), with samples renumbered as `rows` has
    them."""
    if events is None:
        return None
    new_number = torch.full((num_samples,), -1, dtype=torch.int64)
    new_number[rows] = torch.arange(len(rows))
    inside = events[new_number[events.sample] >= 0]
    return replace(inside, sample=new_number[inside.sample])


# --- what is fixed before the first micro-batch of an optimizer step


@dataclass(frozen=True)
class Advantages:
    """What multiplies the policy gradient of every sample or token; 0 where nothing counts."""

    values: Tensor  # [N], or [n] where they differ within samples
    per_token: bool


@dataclass(frozen=True)
class ValueTargets:
    """What a critic is trained on, of the policy tokens of a whole rollout batch."""

    old: Tensor  # float64 [n], its values before the step
    returns: Tensor  # float64 [n], what they were to be; 0 where it is not counted
    is_counted: Tensor  # bool [n]: in the loss


@dataclass(frozen=True)
class LossConstants:
    """Constants of the loss of one optimizer step, for the samples of the whole batch.

    Made by `aggregation.loss_constants` before the first micro-batch, because weights hold the
    denominators of the whole step."""

    batch: SampleBatch
    advantages: Advantages
    weights: Tensor  # float64 [N], of each token of the sample; 0 for samples that are not trained
    weight_slopes: Tensor | None  # float64 [N], by the exponent of lambda_grpo
    turns: Tensor | None  # int32 [n], see `estimators.turn_index`
    preference: Tensor | None = None  # float64 [2, N]: coefficient of the margin, loss
    positive_weights: Tensor | None = None
    """float64 [N], by which each token's negative log-likelihood counts; 0 for what is not right"""
    low_entropy: Tensor | None = None  # bool [n]: loses the surrogate (`top_entropy_share`)
    covariant: Tensor | None = None  # bool [n]: chosen by covariance (clip_cov, kl_cov)
    outlying: Tensor | None = None  # bool [n]: chosen by the second moment of ratios (m2po)
    router_shift: Tensor | None = None
    """fp32 [n], within 0 and 1: how much the routers see a token as the old policy's did
    (`router_shift_floor`); None: entirely"""

    def loss_batch(
        self,
        rows: Tensor,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        entropies: Tensor,
        ref_logprobs: Tensor | None = None,
        untruncated_logprobs: Tensor | None = None,
        replayed_masks: Mapping[str, Tensor] | None = None,
    ) -> LossBatch:
        """Join these constants with what a pass computed of the samples `rows` (int64 [S]).

        All columns are [n] of these samples; without `untruncated_logprobs`, `logprobs` are those.
        replayed_masks: bool by name, of all tokens of the whole batch."""
        device = logprobs.device
        counts = self.batch.token_counts[rows]
        columns = _Columns(rows, counts, self.batch.flat_index(rows), logprobs.dtype, device)
        if self.advantages.per_token:
            advantages = columns.of_tokens(self.advantages.values, logprobs.dtype)
        else:
            advantages = columns.to_tokens(self.advantages.values)
        preference = None
        if self.preference is not None:
            preference = to_device(self.preference[:, rows].to(logprobs.dtype), device)
        masks = None
        if replayed_masks is not None:
            masks = {name: columns.of_tokens(mask) for name, mask in replayed_masks.items()}
        if untruncated_logprobs is None:
            untruncated_logprobs = logprobs
        return LossBatch(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            entropies=entropies,
            advantages=advantages,
            weights=columns.to_tokens(self.weights),
            sample=to_device(torch.arange(len(rows)).repeat_interleave(counts), device),
            token_counts=to_device(counts, device),
            domain=to_device(self.batch.domains[rows], device),
            untruncated_logprobs=untruncated_logprobs,
            ref_logprobs=ref_logprobs,
            turn=columns.numbered_anew(self.turns),
            weight_slopes=columns.to_tokens_if_any(self.weight_slopes),
            preference=preference,
            positive_weights=columns.to_tokens_if_any(self.positive_weights),
            low_entropy=columns.of_tokens_if_any(self.low_entropy),
            covariant=columns.of_tokens_if_any(self.covariant),
            outlying=columns.of_tokens_if_any(self.outlying),
            router_shift=columns.of_tokens_if_any(self.router_shift),
            spoilt=columns.of_tokens_if_any(self.batch.spoilt),
            staleness=columns.of_tokens_if_any(self.batch.staleness),
            replayed_masks=masks,
        )


@dataclass(frozen=True)
class _Columns:
    """Columns of a whole batch, on the host, at the policy tokens of some of its samples."""

    rows: Tensor  # int64 [S]: the samples
    counts: Tensor  # int64 [S]: their policy tokens
    index: Tensor  # int64 [n]: these in the batch
    dtype: torch.dtype
    device: torch.device

    def of_tokens(self, column: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Take what every token of the batch has to those of the samples, on the device: [n]; as
        `dtype`, if it is given."""
        return to_device(column[self.index].to(dtype or column.dtype), self.device)

    def of_tokens_if_any(self, column: Tensor | None) -> Tensor | None:
        """As `of_tokens`; None stays None."""
        if column is None:
            return None
        return self.of_tokens(column)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Give every token the value of its sample, on the device: [N] -> [n]."""
        # repeated on the host, which knows how many tokens that makes
        of_samples = values[self.rows].to(self.dtype)
        return to_device(of_samples.repeat_interleave(self.counts), self.device)

    def to_tokens_if_any(self, values: Tensor | None) -> Tensor | None:
        """As `to_tokens`; None stays None."""
        if values is None:
            return None
        return self.to_tokens(values)

    def numbered_anew(self, turns: Tensor | None) -> Tensor | None:
        """As `of_tokens_if_any`, of turns: those of the samples are 0, 1, ..."""
        if turns is None:
            return None
        _, numbers = torch.unique_consecutive(turns[self.index], return_inverse=True)
        return to_device(numbers, self.device)


# --- a micro-batch


@dataclass(frozen=True)
class LossBatch:
    """What the loss may look at: n policy tokens of the S samples in one micro-batch, flat, prompt
    and padding left out; log-probs at the sampling temperature. All on one device."""

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
    turn: Tensor | None = None  # int64 [n], 0..: the turn of each token
    weight_slopes: Tensor | None = None  # [n], by the exponent of lambda_grpo
    preference: Tensor | None = None  # [2, S]: coefficient of the margin, loss
    positive_weights: Tensor | None = None  # [n], of the negative log-likelihood
    low_entropy: Tensor | None = None  # bool [n]: without a surrogate
    covariant: Tensor | None = None  # bool [n]: chosen by covariance
    outlying: Tensor | None = None  # bool [n]: chosen by the second moment of ratios
    router_shift: Tensor | None = None  # [n], 0..1: agreement with the old routers
    staleness: Tensor | None = None  # int64 [n]: versions between sampling and training
    spoilt: Tensor | None = None  # bool [n]: without a loss, though in all statistics
    replayed_masks: Mapping[str, Tensor] | None = None
    """Who was clipped or rejected when the step was first trained, bool [n] by name; the loss
    follows them, as rounding may decide otherwise."""


@dataclass(frozen=True)
class MismatchInputs:
    """What a mismatch weight is computed from: n tokens of S samples, flat."""

    old_logprobs: Tensor  # [n] proximal policy
    rollout_logprobs: Tensor  # [n] behaviour policy, as the engine reported
    sample: Tensor  # int64 [n], 0..S-1
    token_counts: Tensor  # int64 [S]


@dataclass(frozen=True)
class ClipInputs:
    """What a clip computes the surrogate from. Clip distances are numbers, or [n] where domains
    have their own."""

    log_ratio: Tensor  # [n] with gradient, at the level of the ratio; bounded
    advantages: Tensor  # [n]
    logprobs: Tensor  # [n] with gradient
    old_logprobs: Tensor  # [n] proximal policy
    low: float | Tensor
    high: float | Tensor
    covariant: Tensor | None = None  # bool [n]: chosen by covariance (clip_cov, kl_cov)
