"""What a step's sampled groups say about the policy, over all and by domain (`name@domain`)."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.controller.selection import Selection
from grpo_megatron.controller.training_rows import by_domain
from grpo_megatron.types import ScoredGroup


def group_metrics(groups: Sequence[ScoredGroup], selection: Selection) -> dict[str, float]:
    """Acceptance, success and lengths of groups before any selection.

    pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
    correct completion. What cannot be told (nothing correct, nothing scored) is left out.
    """
    return by_domain(lambda part: _metrics_of(part, selection), groups)


def _metrics_of(groups: Sequence[ScoredGroup], selection: Selection) -> dict[str, float]:
    correct = [selection.correct(group) for group in groups]
    rates = np.array([np.nanmean(c) for c in correct if not np.isnan(c).all()])
    flat = np.concatenate(correct)
    lengths = np.array([len(c.token_ids) for g in groups for c in g.group.completions], float)
    means = {
        "sampling/acceptance_rate": np.array([selection.keeps(group) for group in groups]),
        "group/all_correct_fraction": rates == 1, "group/all_wrong_fraction": rates == 0,
        "accuracy/pass_at_1": rates, "accuracy/pass_at_group": rates > 0,
        "response/length_correct_mean": lengths[flat == 1],
        "response/length_incorrect_mean": lengths[flat == 0],
    }
    tails = {"p95": lengths, "correct_p95": lengths[flat == 1], "incorrect_p95": lengths[flat == 0]}
    return {**{f"response/length_{name}": float(np.percentile(values, 95))
               for name, values in tails.items() if len(values)},
            **{name: float(values.mean()) for name, values in means.items() if len(values)}}
