"""Which groups of a step are kept, and what they say about the policy, also by domain."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.algorithms.batch import ZERO_VARIANCE
from grpo_megatron.config.run import RunConfig
from grpo_megatron.rewards.code_tests import extract
from grpo_megatron.types import ScoredGroup

_BOXED = re.compile(
    r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\})*)\}")


class Selection:
    """The rules of `[sampling]`. Correct is decided by each domain's accuracy component, never by
    the weighted sum: a length penalty makes rewards differ where every answer is right."""

    def __init__(self, config: RunConfig):
        self._settings, self._overlong = config.sampling, config.objective.overlong
        self._trains_all = config.kind != "rl"
        self._accuracy = {d.name: (next(r for r in d.rewards if d.accuracy in (None, r.component)),
                                   d.accuracy_threshold - 1e-9) for d in config.domains}

    def correct(self, group: ScoredGroup) -> np.ndarray:
        """1 correct, 0 incorrect, NaN not scored; float64 [G]."""
        reward, threshold = self._accuracy[group.group.prompt.domain]
        values = group.components[reward.component]
        return np.where(np.isnan(values), np.nan, values >= threshold)

    def answers(self, group: ScoredGroup) -> list[str]:
        """Of completions, what is in the accuracy reward's `answer_tag` or a last `\\boxed{…}`."""
        reward, _ = self._accuracy[group.group.prompt.domain]
        texts = [extract(c.text, reward.arguments.get("answer_tag")) or ""
                 for c in group.group.completions]
        return [[text, *_BOXED.findall(text)][-1].strip() for text in texts]

    def with_statistics(self, group: ScoredGroup) -> ScoredGroup:
        """The group as group statistics see it: `overlong = "drop"` unscores what is truncated."""
        if self._overlong != "drop":
            return group
        cut = _truncated(group)
        components = {name: np.where(cut, np.nan, values)
                      for name, values in group.components.items()}
        return replace(group, components=components, rewards=np.where(cut, np.nan, group.rewards))

    def keeps(self, group: ScoredGroup) -> bool:
        """Whether the group is trained at all; always, with the defaults, and outside of RL."""
        seen = self.with_statistics(group)
        correct = self.correct(seen)
        mixed = bool((correct == 1).any() and (correct == 0).any())
        without_signal = self._settings.zero_variance == "drop" and all_equal(seen.rewards)
        in_loss = self._overlong == "none" or not _truncated(group).all()
        return self._trains_all or (
            in_loss and (mixed or not self._settings.dynamic) and not without_signal)

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Acceptance, success and lengths of groups before any selection.

        pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
        correct completion. What cannot be told (nothing correct, nothing scored) is left out."""
        correct = [self.correct(group) for group in groups]
        rates = np.array([np.nanmean(c) for c in correct if not np.isnan(c).all()])
        flat = np.concatenate(correct)
        lengths = np.array([len(c.token_ids) for g in groups for c in g.group.completions], float)
        right, wrong = lengths[flat == 1], lengths[flat == 0]
        means = {"sampling/acceptance_rate": np.array([self.keeps(group) for group in groups]),
                 "group/all_correct_fraction": rates == 1, "group/all_wrong_fraction": rates == 0,
                 "accuracy/pass_at_1": rates, "accuracy/pass_at_group": rates > 0,
                 "response/length_correct_mean": right, "response/length_incorrect_mean": wrong}
        tails = {"": lengths, "correct_": right, "incorrect_": wrong}
        return {**{f"response/length_{kind}p95": float(np.percentile(values, 95))
                   for kind, values in tails.items() if len(values)},
                **{name: float(values.mean()) for name, values in means.items() if len(values)}}


def not_older(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """The groups without a token that was sampled before weight version `version`."""
    return [g for g in groups if all(span.version >= version for completion
                                     in g.group.completions for span in completion.versions)]


def all_equal(rewards: np.ndarray) -> bool:
    """Whether the scored rewards of a group carry no signal."""
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or float(valid.max() - valid.min()) <= ZERO_VARIANCE


def _truncated(group: ScoredGroup) -> np.ndarray:
    return np.array([completion.truncated for completion in group.group.completions])


def by_domain(metrics_of: Callable[[Sequence[ScoredGroup]], dict[str, float]],
              groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Metrics of all groups and, where there are several domains, `name@domain` of each."""
    metrics = metrics_of(groups)
    domains = sorted({g.group.prompt.domain for g in groups})
    for domain in domains if len(domains) > 1 else ():
        own = metrics_of([g for g in groups if g.group.prompt.domain == domain])
        metrics |= {f"{name}@{domain}": value for name, value in own.items()}
    return metrics


def staleness(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """`staleness/<n>`: share of the tokens that were sampled n weight versions before `step`."""
    tokens: Counter[int] = Counter()
    for completion in (c for group in groups for c in group.group.completions):
        for span in completion.versions:
            tokens[step - span.version] += span.end - span.start
    return {f"staleness/{lag}": n / tokens.total() for lag, n in sorted(tokens.items())}


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    completions = [c for group in groups for c in group.group.completions]
    rewards = np.concatenate([g.rewards for g in groups]).astype(np.float64)
    lengths = np.array([len(c.token_ids) for c in completions], float)
    mean, std = _mean_std(rewards)
    metrics = {"reward/mean": mean, "reward/std": std, "reward/unscorable": np.isnan(rewards).sum(),
               "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
               "response/truncated_fraction": np.mean([c.truncated for c in completions]),
               "prompt/length_mean": np.mean([len(g.group.prompt.token_ids) for g in groups]),
               "batch/num_samples": len(rewards), "batch/num_tokens": lengths.sum(),
               "group/all_equal_fraction": np.mean([all_equal(g.rewards) for g in groups])}
    if kept := [c.kept.sizes for c in completions if c.kept is not None]:
        sizes = np.concatenate(kept)  # 0: the set is not known
        metrics |= {"sampling_mask/size_mean": _mean_std(sizes[sizes > 0])[0],
                    "sampling_mask/missing": (sizes == 0).sum()}
    for name in dict.fromkeys(name for g in groups for name in g.components):
        metrics[f"reward/{name}/mean"], _ = _mean_std(np.concatenate(
            [g.components[name] for g in groups if name in g.components]))
    return {name: float(value) for name, value in metrics.items()}


def _mean_std(values: np.ndarray) -> tuple[float, float]:
    """Of what is not NaN; NaN of nothing."""
    known = values[~np.isnan(values)]
    return (known.mean(), known.std()) if len(known) else (np.nan, np.nan)
