"""Which groups of a step are kept, and what they say about the policy, also by domain."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.batch import Events, SampleBatch, turn_events
from grpo_megatron.algorithms.groups import ZERO_VARIANCE
from grpo_megatron.config.run import RunConfig
from grpo_megatron.rewards.code_tests import extract
from grpo_megatron.types import ScoredGroup, StoredCompletion, policy_tokens_by_version

_BOXED = re.compile(
    r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\})*)\}"
)


class GroupFilter:
    """The rules of `[sampling]`. Correct is decided by each domain's accuracy component, never by
    the weighted sum: a length penalty makes rewards differ where every answer is right."""

    def __init__(self, config: RunConfig):
        self._settings = config.sampling
        self._objective = config.objective
        self._overlong = config.objective.overlong
        self._trains_all = config.kind != "rl"
        self._domains = {domain.name: domain for domain in config.domains}

    def correct(self, group: ScoredGroup) -> np.ndarray:
        """1 correct, 0 incorrect, NaN not scored; float64 [G]."""
        domain = self._domains[group.group.prompt.domain]
        values = group.components[domain.accuracy_component]
        return np.where(np.isnan(values), np.nan, values >= domain.least_correct)

    def unaided(self, group: ScoredGroup) -> np.ndarray:
        """As `correct`, NaN also for completions that answer more than the group's prompt."""
        is_aided = [c.answered_ids is not None for c in group.group.completions]
        return np.where(is_aided, np.nan, self.correct(group))

    def answers(self, group: ScoredGroup) -> list[str]:
        """Of completions, what the accuracy reward looks at (behind the thought, in `answer_tag`),
        or a last `\\boxed{…}` in it."""
        domain = self._domains[group.group.prompt.domain]
        [reward] = [r for r in domain.rewards if r.component == domain.accuracy_component]
        answer_tag = reward.arguments.get("answer_tag")
        think_tag = reward.arguments.get("think_tag")
        answers = []
        for completion in group.group.completions:
            answer = extract(completion.text, answer_tag, think_tag) or ""
            boxed = _BOXED.findall(answer)
            if boxed:
                answer = boxed[-1]
            answers.append(answer.strip())
        return answers

    def with_statistics(self, group: ScoredGroup) -> ScoredGroup:
        """The group as group statistics see it: `overlong = "drop"` unscores what is truncated."""
        if self._overlong != "drop":
            return group
        cut = _truncated(group)
        components = {}
        for name, values in group.components.items():
            components[name] = np.where(cut, np.nan, values)
        return replace(group, components=components, rewards=np.where(cut, np.nan, group.rewards))

    def keeps(self, group: ScoredGroup) -> bool:
        """Whether the group is trained at all; always, with the defaults, and outside of RL."""
        if self._trains_all:
            return True
        if self._overlong != "none" and _truncated(group).all():
            return False
        seen = self.with_statistics(group)
        if self._settings.dynamic:
            correct = self.correct(seen)
            is_mixed = (correct == 1).any() and (correct == 0).any()
            if not is_mixed:
                return False
        return self._settings.zero_variance != "drop" or self._carries_signal(seen)

    def _carries_signal(self, group: ScoredGroup) -> bool:
        domain = self._domains[group.group.prompt.domain]
        weights = {reward.component: reward.weight for reward in domain.rewards}
        objective = self._objective.for_domain(domain.objective)
        return carries_signal(objective, _as_batch(group, weights, self.correct(group) == 1))

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Acceptance, success and lengths of groups before any selection.

        pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
        correct completion, both without the help of exemplars. What cannot be told (nothing
        correct, nothing scored) is left out."""
        of_groups = [self.correct(group) for group in groups]
        rates = _success_rates(of_groups)
        unaided_rates = _success_rates([self.unaided(group) for group in groups])
        correct = np.concatenate(of_groups)
        lengths = _lengths(_completions(groups))
        lengths_correct = lengths[correct == 1]
        lengths_incorrect = lengths[correct == 0]
        metrics: dict[str, float] = {}
        _add_tail(metrics, "response/length_p95", lengths)
        _add_tail(metrics, "response/length_correct_p95", lengths_correct)
        _add_tail(metrics, "response/length_incorrect_p95", lengths_incorrect)
        kept = np.array([self.keeps(group) for group in groups])
        _add_mean(metrics, "sampling/acceptance_rate", kept)
        _add_mean(metrics, "group/all_correct_fraction", rates == 1)
        _add_mean(metrics, "group/all_wrong_fraction", rates == 0)
        _add_mean(metrics, "accuracy/pass_at_1", unaided_rates)
        _add_mean(metrics, "accuracy/pass_at_group", unaided_rates > 0)
        _add_mean(metrics, "response/length_correct_mean", lengths_correct)
        _add_mean(metrics, "response/length_incorrect_mean", lengths_incorrect)
        return metrics


def _success_rates(of_groups: Sequence[np.ndarray]) -> np.ndarray:
    """Share of correct completions, of every group with a known one; float64 [Q]. of_groups: 1
    correct, 0 incorrect, NaN not known."""
    rates = []
    for correct in of_groups:
        if not np.isnan(correct).all():
            rates.append(np.nanmean(correct))
    return np.array(rates)


def _add_mean(metrics: dict[str, float], name: str, values: np.ndarray) -> None:
    """Add the mean, of something."""
    if len(values):
        metrics[name] = float(values.mean())


def _add_tail(metrics: dict[str, float], name: str, values: np.ndarray) -> None:
    """Add the 95th percentile, of something."""
    if len(values):
        metrics[name] = float(np.percentile(values, 95))


def not_older(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """The groups without a token that was sampled before weight version `version`."""
    return [group for group in groups if _oldest_version(group, version) >= version]


def partly_not_older(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """The groups with a token that weight version `version` or a newer one sampled, and those
    without tokens."""
    found = []
    for group in groups:
        newest = max(_tokens_by_version(group.group.completions), default=version)
        if newest >= version:
            found.append(group)
    return found


def num_older_tokens(groups: Sequence[ScoredGroup], version: int) -> int:
    """Count the policy's tokens that were sampled before weight version `version`."""
    tokens = _tokens_by_version(_completions(groups))
    return sum(count for sampled_by, count in tokens.items() if sampled_by < version)


def _oldest_version(group: ScoredGroup, default: int) -> int:
    """Of the weights that sampled a token of the group; `default` for a group without tokens."""
    return min(_tokens_by_version(group.group.completions), default=default)


def all_equal(rewards: np.ndarray) -> bool:
    """Whether the scored rewards of a group carry no signal."""
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or float(valid.max() - valid.min()) <= ZERO_VARIANCE


def _as_batch(group: ScoredGroup, weights: Mapping[str, float], correct: np.ndarray) -> SampleBatch:
    """A group as estimators see it, without token columns. correct: bool [G]."""
    size = len(group.rewards)
    lengths = [completion.num_policy_tokens for completion in group.group.completions]
    components = {}
    component_weights = {}
    for name, values in group.components.items():
        components[name] = torch.from_numpy(np.asarray(values, np.float64))
        component_weights[name] = torch.full((size,), weights[name], dtype=torch.float64)
    return SampleBatch(
        rewards=torch.from_numpy(np.asarray(group.rewards, np.float64)),
        group_ids=torch.zeros(size, dtype=torch.int64),
        token_counts=torch.tensor(lengths, dtype=torch.int64),
        sample_ids=torch.arange(size),
        domains=torch.zeros(size, dtype=torch.int64),
        trained=torch.ones(size, dtype=torch.bool),
        components=components,
        component_weights=component_weights,
        correct=torch.from_numpy(correct),
        events=_step_events(group),
        turns=_turns(group),
    )


def _step_events(group: ScoredGroup) -> Events | None:
    """Step rewards, one token a step: where exactly a step ends does not matter for whether the
    rewards of the group differ, only that steps of a sample are not added up."""
    rows = []
    ends = []
    rewards = []
    for row, steps in enumerate(group.steps):
        num_tokens = group.group.completions[row].num_policy_tokens
        for number, (_, reward) in enumerate(steps[:num_tokens]):
            rows.append(row)
            ends.append(number)
            rewards.append(reward)
    if not rows:
        return None
    return Events(
        sample=torch.tensor(rows),
        end=torch.tensor(ends),
        reward=torch.tensor(rewards, dtype=torch.float64),
    )


def _turns(group: ScoredGroup) -> Events | None:
    """Turns of the group's episodes; None where they have none."""
    samples = []
    has_turns = False
    for completion in group.group.completions:
        sequences = []
        for sequence in completion.sequences:
            sequences.append((sequence.turns, sequence.num_tokens))
            has_turns |= bool(sequence.turns)
        samples.append(sequences)
    if not has_turns:
        return None
    return turn_events(samples)


def _completions(groups: Sequence[ScoredGroup]) -> list[StoredCompletion]:
    """One group after the other."""
    completions: list[StoredCompletion] = []
    for group in groups:
        completions += group.group.completions
    return completions


def _lengths(completions: Sequence[StoredCompletion]) -> np.ndarray:
    """Policy tokens of each, float64 [N]."""
    return np.array([completion.num_policy_tokens for completion in completions], float)


def _tokens_by_version(completions: Sequence[StoredCompletion]) -> Counter[int]:
    """How many policy tokens each weight version sampled."""
    tokens: Counter[int] = Counter()
    for completion in completions:
        for sequence in completion.sequences:
            counted = policy_tokens_by_version(
                sequence.versions, sequence.turns, sequence.num_tokens
            )
            tokens.update(counted)
    return tokens


def _truncated(group: ScoredGroup) -> np.ndarray:
    """bool [G]."""
    return np.array([completion.truncated for completion in group.group.completions])


def by_domain(
    metrics_of: Callable[[Sequence[ScoredGroup]], dict[str, float]], groups: Sequence[ScoredGroup]
) -> dict[str, float]:
    """Metrics of all groups and, where there are several domains, `name@domain` of each."""
    metrics = metrics_of(groups)
    of_domains: dict[str, list[ScoredGroup]] = {}
    for group in groups:
        of_domains.setdefault(group.group.prompt.domain, []).append(group)
    if len(of_domains) > 1:
        for domain, members in sorted(of_domains.items()):
            for name, value in metrics_of(members).items():
                metrics[f"{name}@{domain}"] = value
    return metrics


def staleness(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """`staleness/<n>`: share of the tokens that were sampled n weight versions before `step`."""
    tokens = _tokens_by_version(_completions(groups))
    metrics = {}
    for version, count in sorted(tokens.items(), reverse=True):
        metrics[f"staleness/{step - version}"] = count / tokens.total()
    return metrics


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, lengths and sizes of what was sampled; means and deviations are over samples."""
    completions = _completions(groups)
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    lengths = _lengths(completions)
    prompt_lengths = [len(group.group.prompt.token_ids) for group in groups]
    mean, std = _mean_std(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": std,
        "reward/unscorable": np.isnan(rewards).sum(),
        "response/length_mean": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/truncated_fraction": np.mean([c.truncated for c in completions]),
        "prompt/length_mean": np.mean(prompt_lengths),
        "batch/num_samples": len(rewards),
        "batch/num_tokens": lengths.sum(),
        "group/all_equal_fraction": np.mean([all_equal(group.rewards) for group in groups]),
    }
    metrics |= _sampling_mask_metrics(completions)
    metrics |= _turn_metrics(completions)
    of_components: dict[str, list[np.ndarray]] = {}
    for group in groups:
        for name, values in group.components.items():
            of_components.setdefault(name, []).append(values)
    for name, parts in of_components.items():
        metrics[f"reward/{name}/mean"], _ = _mean_std(np.concatenate(parts))
    return {name: float(value) for name, value in metrics.items()}


def _sampling_mask_metrics(completions: Sequence[StoredCompletion]) -> dict[str, float]:
    """How many ids truncated sampling left a token where they are known, and at how many tokens
    they are not; empty where nothing was truncated."""
    counts = []
    for completion in completions:
        for sequence in completion.sequences:
            if sequence.kept_counts is not None:
                counts.append(sequence.kept_counts)
    if not counts:
        return {}
    num_ids, num_known, num_missing = np.array(counts).sum(axis=0)
    mean = np.nan
    if num_known:
        mean = num_ids / num_known
    return {"sampling_mask/size_mean": mean, "sampling_mask/missing": num_missing}


def _turn_metrics(completions: Sequence[StoredCompletion]) -> dict[str, float]:
    """Turns and sequences of episodes, and tokens of environments; empty where there are none."""
    num_turns = 0
    num_spoilt = 0
    num_sequences = 0
    num_of_environment = 0
    for completion in completions:
        num_sequences += len(completion.sequences)
        num_of_environment -= completion.num_policy_tokens
        for sequence in completion.sequences:
            num_turns += len(sequence.turns)
            num_spoilt += sum(turn.spoilt for turn in sequence.turns)
            num_of_environment += sequence.num_tokens
    if num_turns == 0:
        return {}
    return {
        "response/turns_mean": num_turns / len(completions),
        "response/sequences_mean": num_sequences / len(completions),
        "response/environment_tokens_mean": num_of_environment / len(completions),
        "response/spoilt_turn_fraction": num_spoilt / num_turns,
    }


def outcome_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Means of what environments counted in their episodes, as `environment/DOMAIN/NAME_mean`, over
    those that have it; empty where there are none."""
    values: dict[str, list[float]] = {}
    for group in groups:
        domain = group.group.prompt.domain
        for completion in group.group.completions:
            for name, value in completion.outcome_metrics.items():
                values.setdefault(f"environment/{domain}/{name}_mean", []).append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def _mean_std(values: np.ndarray) -> tuple[float, float]:
    """Of what is not NaN; NaN of nothing."""
    known = values[~np.isnan(values)]
    if not len(known):
        return np.nan, np.nan
    return known.mean(), known.std()
