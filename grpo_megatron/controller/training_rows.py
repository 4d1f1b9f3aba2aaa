"""From scored groups to the rows that the trainer trains: updates, metrics."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from grpo_megatron.algorithms.groups import ZERO_VARIANCE
from grpo_megatron.types import ScoredGroup


def updates_of(num_groups: int, updates: int) -> np.ndarray:
    """Which optimizer step trains each group: contiguous parts of nearly equal size, int [Q]."""
    return np.arange(num_groups) * min(updates, num_groups) // num_groups


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
    """Rewards by component, lengths, group composition."""
    rewards = np.concatenate([g.rewards for g in groups]).astype(np.float64)
    lengths = np.array([len(c.token_ids) for g in groups for c in g.group.completions], float)
    truncated = np.array([c.truncated for g in groups for c in g.group.completions])
    prompts = np.array([len(g.group.prompt.token_ids) for g in groups], float)
    valid = rewards[~np.isnan(rewards)]
    metrics = {
        "reward/mean": _mean(valid), "reward/std": float(valid.std()) if len(valid) else np.nan,
        "reward/unscorable": float(np.isnan(rewards).sum()),
        "response/length_mean": float(lengths.mean()), "response/length_max": lengths.max(),
        "response/truncated_fraction": float(truncated.mean()),
        "prompt/length_mean": float(prompts.mean()),
        "batch/num_samples": float(len(rewards)), "batch/num_tokens": float(lengths.sum()),
        "group/all_equal_fraction": float(np.mean([all_equal(g.rewards) for g in groups])),
    }
    metrics |= _kept_metrics(groups)
    for name in dict.fromkeys(name for g in groups for name in g.components):
        values = np.concatenate([g.components[name] for g in groups if name in g.components])
        metrics[f"reward/{name}/mean"] = _mean(values[~np.isnan(values)])
    return {name: float(value) for name, value in metrics.items()}


def _kept_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Of truncated sampling: ids kept per token, tokens whose set is not known."""
    kept = [c.kept.sizes for g in groups for c in g.group.completions if c.kept is not None]
    if not kept:
        return {}
    sizes = np.concatenate(kept)
    return {"sampling_mask/size_mean": _mean(sizes[sizes > 0]),
            "sampling_mask/missing": float((sizes == 0).sum())}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def all_equal(rewards: np.ndarray) -> bool:
    """Whether the scored rewards of a group carry no signal."""
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or float(valid.max() - valid.min()) <= ZERO_VARIANCE
