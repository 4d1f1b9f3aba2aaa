"""Which groups are kept and which of their samples are trained."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.algorithms.groups import ZERO_VARIANCE
from grpo_megatron.config.run import RunConfig
from grpo_megatron.types import ScoredGroup


class Selection:
    """The rules of `[sampling]`. Correct is decided by each domain's accuracy component, never by
    the weighted sum: a length penalty makes rewards differ where every answer is right."""

    def __init__(self, config: RunConfig):
        self._settings, self._overlong = config.sampling, config.objective.overlong
        self._accuracy = {d.name: (d.accuracy or d.rewards[0].component,
                                   d.accuracy_threshold - 1e-9) for d in config.domains}

    def correct(self, group: ScoredGroup) -> np.ndarray:
        """1 correct, 0 incorrect, NaN not scored; float64 [G]."""
        component, threshold = self._accuracy[group.group.prompt.domain]
        values = group.components[component]
        return np.where(np.isnan(values), np.nan, values >= threshold)

    def with_statistics(self, group: ScoredGroup) -> ScoredGroup:
        """The group as group statistics see it: `overlong = "drop"` unscores what is truncated."""
        if self._overlong != "drop":
            return group
        cut = _truncated(group)
        components = {name: np.where(cut, np.nan, values)
                      for name, values in group.components.items()}
        return replace(group, components=components, rewards=np.where(cut, np.nan, group.rewards))

    def keeps(self, group: ScoredGroup) -> bool:
        """Whether the group is trained at all; always, with the defaults."""
        seen = self.with_statistics(group)
        correct = self.correct(seen)
        mixed = bool((correct == 1).any() and (correct == 0).any())
        without_signal = self._settings.zero_variance == "drop" and all_equal(seen.rewards)
        in_loss = self._overlong == "none" or not _truncated(group).all()
        return in_loss and (mixed or not self._settings.dynamic) and not without_signal


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
