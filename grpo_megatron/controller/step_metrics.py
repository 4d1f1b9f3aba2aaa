"""What a step's groups say about the policy, over all and by domain (`name@domain`)."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from grpo_megatron.controller.selection import Selection, all_equal
from grpo_megatron.types import ScoredGroup


def by_domain(metrics_of: Callable[[Sequence[ScoredGroup]], dict[str, float]],
              groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Metrics of all groups and, where there are several domains, `name@domain` of each."""
    metrics = metrics_of(groups)
    domains = sorted({g.group.prompt.domain for g in groups})
    for domain in domains if len(domains) > 1 else ():
        own = metrics_of([g for g in groups if g.group.prompt.domain == domain])
        metrics |= {f"{name}@{domain}": value for name, value in own.items()}
    return metrics


def group_metrics(groups: Sequence[ScoredGroup], selection: Selection) -> dict[str, float]:
    """Acceptance, success and lengths of groups before any selection.

    pass_at_1 is the mean success rate of a prompt, pass_at_group the fraction of prompts with a
    correct completion. What cannot be told (nothing correct, nothing scored) is left out."""
    correct = [selection.correct(group) for group in groups]
    rates = np.array([np.nanmean(c) for c in correct if not np.isnan(c).all()])
    flat = np.concatenate(correct)
    lengths = np.array([len(c.token_ids) for g in groups for c in g.group.completions], float)
    right, wrong = lengths[flat == 1], lengths[flat == 0]
    means = {
        "sampling/acceptance_rate": np.array([selection.keeps(group) for group in groups]),
        "group/all_correct_fraction": rates == 1, "group/all_wrong_fraction": rates == 0,
        "accuracy/pass_at_1": rates, "accuracy/pass_at_group": rates > 0,
        "response/length_correct_mean": right, "response/length_incorrect_mean": wrong}
    tails = {"": lengths, "correct_": right, "incorrect_": wrong}
    return {**{f"response/length_{kind}p95": float(np.percentile(values, 95))
               for kind, values in tails.items() if len(values)},
            **{name: float(values.mean()) for name, values in means.items() if len(values)}}


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
    metrics = {
        "reward/mean": _mean(rewards), "reward/std": _known(rewards).std()
        if len(_known(rewards)) else np.nan, "reward/unscorable": np.isnan(rewards).sum(),
        "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
        "response/truncated_fraction": np.mean([c.truncated for c in completions]),
        "prompt/length_mean": np.mean([len(g.group.prompt.token_ids) for g in groups]),
        "batch/num_samples": len(rewards), "batch/num_tokens": lengths.sum(),
        "group/all_equal_fraction": np.mean([all_equal(g.rewards) for g in groups])}
    if kept := [c.kept.sizes for c in completions if c.kept is not None]:
        sizes = np.concatenate(kept)  # 0: the set is not known
        metrics |= {"sampling_mask/size_mean": _mean(sizes[sizes > 0]),
                    "sampling_mask/missing": (sizes == 0).sum()}
    for name in dict.fromkeys(name for g in groups for name in g.components):
        metrics[f"reward/{name}/mean"] = _mean(np.concatenate(
            [g.components[name] for g in groups if name in g.components]))
    return {name: float(value) for name, value in metrics.items()}


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _mean(values: np.ndarray) -> float:
    """Of what is not NaN; NaN of nothing."""
    return float(_known(values).mean()) if len(_known(values)) else float("nan")
