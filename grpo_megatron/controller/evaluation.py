"""Accuracy of the published weights by domain: greedy, pass@k, majority@k, with intervals."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.session import Session
from grpo_megatron.types import Prompt, ScoredGroup

Results = dict[str, dict[str, float]]
_Z = 1.959964  # 95 %


async def greedy_accuracy(session: Session, prompts: Sequence[Prompt]) -> float:
    """Share of prompts whose most likely answer, of the published weights, is correct."""
    return (await evaluate(session, prompts))["all"].get("accuracy", math.nan)


async def evaluate(session: Session, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
    """By domain, and over all prompts as `all`: `accuracy` (greedy) and, with n samples a prompt,
    `pass_at_k` and `majority_at_k`, k = 1, 2, 4, …, n; `_low` and `_high`: Wilson's interval."""
    if not prompts:
        return {"all": {"prompts": 0.0}}
    worker = session.worker
    await session.judges.wake()
    found = _by_domain(
        session,
        await session.rewards.score(
            await worker.greedy(prompts, session.config.rollout.max_new_tokens)
        ),
        _greedy,
    )
    if num_samples:
        groups = await worker.rollouts(0, prompts, num_samples=num_samples)
        sampled = _by_domain(session, await session.rewards.score(groups), _sampled)
        found = {domain: {**values, **sampled[domain]} for domain, values in found.items()}
    names = dict.fromkeys(name for values in found.values() for name in values)
    sizes = [values["prompts"] for values in found.values()]
    every = {
        name: float(np.average([values[name] for values in found.values()], weights=sizes))
        for name in names
        if not name.endswith(("_low", "_high"))
    }
    return {**found, "all": every | {"prompts": float(len(prompts))}}


def _by_domain(
    session: Session,
    scored: Sequence[ScoredGroup],
    measure: Callable[[ScoredGroup, GroupFilter], Mapping[str, float]],
) -> Results:
    selection = GroupFilter(session.config)
    results = {}
    for domain in dict.fromkeys(group.group.prompt.domain for group in scored):
        rows = [measure(g, selection) for g in scored if g.group.prompt.domain == domain]
        results[domain] = {"prompts": float(len(rows))}
        for name in rows[0]:
            mean = float(np.mean([row[name] for row in rows]))
            low, high = wilson(mean, len(rows))
            results[domain] |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return results


def _greedy(group: ScoredGroup, selection: GroupFilter) -> dict[str, float]:
    return {"accuracy": float(selection.correct(group)[0] == 1)}


def _sampled(group: ScoredGroup, selection: GroupFilter) -> dict[str, float]:
    correct = selection.correct(group) == 1
    answers = selection.answers(group)
    found = {}
    total = len(correct)
    for k in sorted({*(2**i for i in range(total.bit_length())), total}):
        found[f"pass_at_{k}"] = pass_at_k(total, int(correct.sum()), k)
        winner = Counter(answers[:k]).most_common(1)[0][0]
        found[f"majority_at_{k}"] = float(correct[answers.index(winner)])
    return found


def pass_at_k(total: int, correct: int, k: int) -> float:
    """Probability that one of k samples is correct, unbiased (Chen et al., arXiv:2107.03374)."""
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a mean of `count` values in [0, 1] (Wilson, 1927)."""
    shrunk = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return max(shrunk - half, 0.0), min(shrunk + half, 1.0)
