"""Accuracy of the published weights by domain: greedy, pass@k, majority@k, with intervals."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup, StoredCompletion

Results = dict[str, dict[str, float]]
_Z = 1.959964  # 95 %


class HeldOutEvaluator(Protocol):
    """Measures accuracy on prompts that are kept out of training."""

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Return the accuracy over all `prompts`; NaN without any."""

    async def evaluate(self, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
        """Return what is measured by domain, and over all prompts as `all`."""


class Evaluator:
    """Asks the engines for answers and scores them; judges are woken before."""

    def __init__(
        self,
        config: RunConfig,
        *,
        dispatcher: ChunkDispatcher,
        rewards: RewardPool,
        judges: EngineControl,
    ):
        self._max_new_tokens = config.rollout.max_new_tokens
        self._filter = GroupFilter(config)
        self._dispatcher = dispatcher
        self._rewards = rewards
        self._judges = judges

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Return the share of prompts whose most likely answer, of the published weights, is
        correct; NaN without prompts."""
        results = await self.evaluate(prompts)
        return results["all"].get("accuracy", math.nan)

    async def evaluate(self, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
        """Return results by domain, and over all prompts as `all`: `accuracy` (greedy) and, with n
        samples a prompt, `pass_at_k` and `majority_at_k`, k = 1, 2, 4, …, n; `_low` and `_high`:
        Wilson's interval."""
        if not prompts:
            return {"all": {"prompts": 0.0}}
        await self._judges.resume()
        answers = await self._dispatcher.greedy(prompts, self._max_new_tokens)
        results = self._by_domain(await self._score(answers), _greedy)
        if num_samples:
            groups = await self._dispatcher.rollouts(0, prompts, num_samples=num_samples)
            sampled = self._by_domain(await self._score(groups), _sampled)
            for domain, values in sampled.items():
                results[domain] |= values
        results["all"] = over_domains(results, len(prompts))
        return results

    async def _score(self, groups: Sequence[RolloutGroup[StoredCompletion]]) -> list[ScoredGroup]:
        # a step may be sampled meanwhile, whose metrics count failures
        return await self._rewards.score(groups, is_counted=False)

    def _by_domain(
        self,
        scored: Sequence[ScoredGroup],
        measure: Callable[[ScoredGroup, GroupFilter], Mapping[str, float]],
    ) -> Results:
        """Return means of what is measured of each prompt, with their intervals."""
        rows: dict[str, list[Mapping[str, float]]] = {}
        for group in scored:
            rows.setdefault(group.group.prompt.domain, []).append(measure(group, self._filter))
        results: Results = {}
        for domain, of_prompts in rows.items():
            found = {"prompts": float(len(of_prompts))}
            for name in of_prompts[0]:
                mean = float(np.mean([row[name] for row in of_prompts]))
                low, high = wilson(mean, len(of_prompts))
                found[name] = mean
                found[f"{name}_low"] = low
                found[f"{name}_high"] = high
            results[domain] = found
        return results


def over_domains(results: Results, num_prompts: int) -> dict[str, float]:
    """Return means over all prompts of results by domain; they have no intervals, since domains
    differ."""
    sizes = [values["prompts"] for values in results.values()]
    names: dict[str, None] = {}  # ordered
    for values in results.values():
        names.update(dict.fromkeys(values))
    means = {}
    for name in names:
        if not name.endswith(("_low", "_high")):
            of_domains = [values[name] for values in results.values()]
            means[name] = float(np.average(of_domains, weights=sizes))
    means["prompts"] = float(num_prompts)
    return means


def _greedy(group: ScoredGroup, selection: GroupFilter) -> dict[str, float]:
    return {"accuracy": float(selection.correct(group)[0] == 1)}


def _sampled(group: ScoredGroup, selection: GroupFilter) -> dict[str, float]:
    correct = selection.correct(group) == 1
    answers = selection.answers(group)
    total = len(correct)
    sizes = {2**power for power in range(total.bit_length())} | {total}
    found = {}
    for k in sorted(sizes):
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
