"""Metrics of what was sampled for a step, also by domain."""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_megatron.algorithms.groups import ZERO_VARIANCE
from grpo_megatron.types import ScoredGroup, StoredCompletion


def by_domain(
    metrics_of: Callable[[Sequence[ScoredGroup]], dict[str, float]], groups: Sequence[ScoredGroup]
) -> dict[str, float]:
    """Return the metrics of all groups and, where there are several domains, each domain's as
    `name@domain`."""
    metrics = metrics_of(groups)
    of_domains: dict[str, list[ScoredGroup]] = {}
    for group in groups:
        of_domains.setdefault(group.group.prompt.domain, []).append(group)
    if len(of_domains) > 1:
        for domain, members in sorted(of_domains.items()):
            for name, value in metrics_of(members).items():
                metrics[f"{name}@{domain}"] = value
    return metrics


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return rewards, lengths and sizes of what was sampled; means and deviations are over
    samples."""
    completions = completions_of(groups)
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    lengths = policy_lengths(completions)
    prompt_lengths = [_prompt_length(group) for group in groups]
    mean, std = _mean_std(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": std,
        "reward/unscorable": np.isnan(rewards).sum(),
        "reward/unscorable_fraction": np.isnan(rewards).mean(),
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


def outcome_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the means of what environments counted in their episodes, as
    `environment/DOMAIN/NAME_mean`, over the episodes that have it; empty where there are none."""
    values: dict[str, list[float]] = {}
    for group in groups:
        domain = group.group.prompt.domain
        for completion in group.group.completions:
            for name, value in completion.outcome_metrics.items():
                values.setdefault(f"environment/{domain}/{name}_mean", []).append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def _sampling_mask_metrics(completions: Sequence[StoredCompletion]) -> dict[str, float]:
    """Return the mean size of the sampling masks that are known, and the number of tokens whose
    mask is not; empty where sampling was not truncated."""
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
    """Return numbers of turns, sequences and environment tokens; empty where nothing has turns."""
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


def all_equal(rewards: np.ndarray) -> bool:
    """Whether the scored rewards of a group carry no signal."""
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or float(valid.max() - valid.min()) <= ZERO_VARIANCE


def completions_of(groups: Sequence[ScoredGroup]) -> list[StoredCompletion]:
    """Return the completions of all groups, one group after the other."""
    completions: list[StoredCompletion] = []
    for group in groups:
        completions += group.group.completions
    return completions


def policy_lengths(completions: Sequence[StoredCompletion]) -> np.ndarray:
    """Return the policy tokens of each completion, float64 [N]."""
    return np.array([completion.num_policy_tokens for completion in completions], float)


def _prompt_length(group: ScoredGroup) -> float:
    """Return what the engine read before the first token of a sample, the mean over the group: with
    the rules and tools of an environment, exemplars, the attempt that a retry goes on from."""
    prompt = group.group.prompt
    lengths = []
    for completion in group.group.completions:
        lengths.append(completion.sequences[0].prompt_length(prompt))
    return float(np.mean(lengths))


def _mean_std(values: np.ndarray) -> tuple[float, float]:
    """Return mean and deviation of the values that are not NaN; NaN where all are."""
    known = values[~np.isnan(values)]
    if not len(known):
        return np.nan, np.nan
    return known.mean(), known.std()
