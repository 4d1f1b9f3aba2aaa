"""Accuracy of the published weights by domain: greedy, pass@k, majority@k, with intervals.

All are shares of the prompts that could be scored. An answer that could not be scored (its reward
failed, or says so) is neither right nor wrong."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from grpo_megatron.config.evaluated_share import UNSCORABLE, EvaluatedShare, share_of
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

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> EvaluatedShare:
        """Return the accuracy over all `prompts`."""

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

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> EvaluatedShare:
        """Return the share of prompts whose most likely answer, of the published weights, is
        correct."""
        results = await self.evaluate(prompts)
        return share_of(results["all"], "accuracy")

    async def evaluate(self, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
        """Return results by domain, and over all prompts as `all`: `accuracy` (greedy) and, with n
        samples a prompt, `pass_at_k` and `majority_at_k`, k = 1, 2, 4, …, n; `_unscorable`: how
        many prompts each leaves out, since they could not be scored; `_low` and `_high`, not of
        `all`, whose domains differ: Wilson's interval. What no prompt could be scored for is left
        out."""
        if not prompts:
            return {"all": {"prompts": 0.0}}
        await self._judges.resume()
        answers = await self._dispatcher.greedy(prompts, self._max_new_tokens)
        results = self._results(await self._score(answers), _greedy)
        if num_samples:
            groups = await self._dispatcher.rollouts(0, prompts, num_samples=num_samples)
            sampled = self._results(await self._score(groups), _sampled)
            for domain, values in sampled.items():
                results[domain] |= values
        return results

    async def _score(self, groups: Sequence[RolloutGroup[StoredCompletion]]) -> list[ScoredGroup]:
        # a step may be sampled meanwhile, whose metrics count failures
        return await self._rewards.score(groups, is_counted=False)

    def _results(
        self,
        scored: Sequence[ScoredGroup],
        measure: Callable[[ScoredGroup, GroupFilter], Mapping[str, float]],
    ) -> Results:
        """Return means of what is measured of each prompt, by domain with their intervals, and over
        all prompts as `all`."""
        rows: dict[str, list[Mapping[str, float]]] = {}
        every_row = []
        for group in scored:
            row = measure(group, self._filter)
            rows.setdefault(group.group.prompt.domain, []).append(row)
            every_row.append(row)
        results: Results = {}
        for domain, of_domain in rows.items():
            results[domain] = _means(of_domain, has_intervals=True)
        results["all"] = _means(every_row, has_intervals=False)
        return results


def _means(rows: Sequence[Mapping[str, float]], *, has_intervals: bool) -> dict[str, float]:
    """Return the means of what is measured of prompts (see `Evaluator.evaluate`). rows: of each
    prompt, the same names; NaN: it could not be scored."""
    found = {"prompts": float(len(rows))}
    for name in rows[0]:
        known = [row[name] for row in rows if not math.isnan(row[name])]
        if known:
            mean = float(np.mean(known))
            found[name] = mean
            if has_intervals:
                found[f"{name}_low"], found[f"{name}_high"] = wilson(mean, len(known))
        found[name + UNSCORABLE] = float(len(rows) - len(known))
    return found


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
    """Return whether the answer is right; NaN where it could not be scored."""
    return {"accuracy": float(selection.correct(group)[0])}


def _sampled(group: ScoredGroup, selection: GroupFilter) -> dict[str, float]:
    """Return pass@k and majority@k of a prompt by its n samples, k = 1, 2, 4, …, n; NaN where they
    could not be scored.

    pass@k is that of the samples that could be scored, and needs k of them. All of the first k
    vote: an answer needs no score for that. It is right or wrong as the first of its samples that
    could be scored."""
    correct = selection.correct(group)
    answers = selection.answers(group)
    total = len(correct)
    num_scored = int(np.isfinite(correct).sum())
    num_correct = int((correct == 1).sum())
    sizes = {2**power for power in range(total.bit_length())} | {total}
    found = {}
    for k in sorted(sizes):
        found[f"pass_at_{k}"] = math.nan
        if num_scored >= k:
            found[f"pass_at_{k}"] = pass_at_k(num_scored, num_correct, k)
        winner = Counter(answers[:k]).most_common(1)[0][0]
        of_winner = [correct[i] for i in range(k) if answers[i] == winner]
        found[f"majority_at_{k}"] = _first_known(of_winner)
    return found


def _first_known(values: Sequence[float]) -> float:
    """Return the first value that is not NaN; NaN where all are."""
    for value in values:
        if not math.isnan(value):
            return float(value)
    return math.nan


def pass_at_k(total: int, correct: int, k: int) -> float:
    """Probability that one of k samples is correct, unbiased (Chen et al., arXiv:2107.03374)."""
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a mean of `count` values in [0, 1] (Wilson, 1927)."""
    shrunk = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return max(shrunk - half, 0.0), min(shrunk + half, 1.0)
