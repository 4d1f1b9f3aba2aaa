"""What a step's sampled groups say about the policy, over all and by domain (`name@domain`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_megatron.controller.selection import Selection
from grpo_megatron.types import ScoredGroup


def group_metrics(groups: Sequence[ScoredGroup], selection: Selection) -> dict[str, float]:
    """Acceptance, success and lengths of groups before any selection.

    pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
    correct completion. What cannot be told (nothing correct, nothing scored) is left out.
    """
    metrics = _metrics_of(groups, selection)
    domains = sorted({g.group.prompt.domain for g in groups})
    for domain in domains if len(domains) > 1 else ():
        own = _metrics_of([g for g in groups if g.group.prompt.domain == domain], selection)
        metrics |= {f"{name}@{domain}": value for name, value in own.items()}
    return metrics


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
    return {"response/length_p95": float(np.percentile(lengths, 95)),
            **{name: float(values.mean()) for name, values in means.items() if len(values)}}
