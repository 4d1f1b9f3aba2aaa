"""Which groups of a step are trained, by the rules of `[sampling]`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.batch import Events, SampleBatch, turn_events
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.sampling_metrics import completions_of, policy_lengths
from grpo_megatron.rewards.code_tests import extract
from grpo_megatron.types import ScoredGroup

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
        """Return what `correct` does, with NaN also for completions that answer more than the
        prompt of the group, such as exemplars before it."""
        is_aided = [c.answered_ids is not None for c in group.group.completions]
        return np.where(is_aided, np.nan, self.correct(group))

    def answers(self, group: ScoredGroup) -> list[str]:
        """Return what the accuracy reward looks at in each completion (behind the thought, in
        `answer_tag`), or the last `\\boxed{…}` in it."""
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
        """Return the group as group statistics see it: without the rewards of truncated completions
        if `overlong = "drop"`."""
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

    def dropped_rewards(self, sampled: Sequence[ScoredGroup]) -> dict[str, list[float]]:
        """Return the rewards, by domain, of the groups that are not kept, as group statistics see
        them; unscorable ones are left out."""
        found: dict[str, list[float]] = {}
        for group in sampled:
            if self.keeps(group):
                continue
            rewards = self.with_statistics(group).rewards
            of_domain = found.setdefault(group.group.prompt.domain, [])
            of_domain += rewards[~np.isnan(rewards)].tolist()
        return found

    def _carries_signal(self, group: ScoredGroup) -> bool:
        domain = self._domains[group.group.prompt.domain]
        weights = {reward.component: reward.weight for reward in domain.rewards}
        objective = self._objective.for_domain(domain.objective)
        return carries_signal(objective, _as_batch(group, weights, self.correct(group) == 1))

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return acceptance, success and lengths of groups before any selection.

        pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
        correct completion, both without the help of exemplars. What is not known (nothing correct,
        nothing scored) is left out."""
        of_groups = [self.correct(group) for group in groups]
        rates = _success_rates(of_groups)
        unaided_rates = _success_rates([self.unaided(group) for group in groups])
        correct = np.concatenate(of_groups)
        lengths = policy_lengths(completions_of(groups))
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
    """Return the share of correct completions of every group that has a scored one; float64 [Q].

    of_groups: 1 correct, 0 incorrect, NaN not scored; [G] each."""
    rates = []
    for correct in of_groups:
        if not np.isnan(correct).all():
            rates.append(np.nanmean(correct))
    return np.array(rates)


def _add_mean(metrics: dict[str, float], name: str, values: np.ndarray) -> None:
    """Add the mean, if there are values."""
    if len(values):
        metrics[name] = float(values.mean())


def _add_tail(metrics: dict[str, float], name: str, values: np.ndarray) -> None:
    """Add the 95th percentile, if there are values."""
    if len(values):
        metrics[name] = float(np.percentile(values, 95))


def _as_batch(group: ScoredGroup, weights: Mapping[str, float], correct: np.ndarray) -> SampleBatch:
    """Return a group as advantage estimators see it, without token columns. correct: bool [G]."""
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
    """Return the step rewards, as if each step were one token: whether rewards of the group differ
    does not depend on where a step ends, only on that the steps of a sample are not added up."""
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
    """Return the turns of the group's episodes; None where no completion has any."""
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


def _truncated(group: ScoredGroup) -> np.ndarray:
    """Return which completions were truncated, bool [G]."""
    return np.array([completion.truncated for completion in group.group.completions])
