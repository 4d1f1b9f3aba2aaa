"""Samples of a step for the prompts that still say most (XRPO, arXiv:2510.06672).

Every prompt first gets a base number. The rest of the budget goes out in rounds, one sample after
the other, each to the prompt with the highest priority:

    priority = h(n) - h(n + 1) + lambda sqrt(log(1 + T) / n)
    h(n)     = t_{1 - alpha/2, n - 1} s / sqrt(n)

n is the number of samples of the prompt, s the deviation of its rewards so far, h the half-width of
Student's interval of their mean, T the number of samples that the step has given out."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from grpo_megatron.config.allocation import AllocationConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.seeding import Seeding
from grpo_megatron.types import Prompt, ScoredGroup

Ask = Callable[
    [int, Sequence[Prompt], Sequence[Prompt], Sequence[range]], Awaitable[list[ScoredGroup]]
]
"""(step, prompts, what is asked in their place, sample numbers of each) -> their scored groups."""


class Allocation:
    """`[allocation]` of one run, `settings`. `ask` samples and scores."""

    def __init__(
        self,
        config: RunConfig,
        settings: AllocationConfig,
        *,
        ask: Ask,
        group_filter: GroupFilter,
        seeding: Seeding | None,
    ):
        self._settings = settings
        self._mean_size = config.batch.num_samples_per_prompt
        self._most = config.largest_group
        self._ask = ask
        self._filter = group_filter
        self._seeding = seeding
        self._num_given = 0  # of the step
        self._num_rounds = 0
        self._sizes: list[int] = []  # of the step's groups

    async def sample(self, step: int, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Return scored groups of the prompts, in their order, of `batch.num_samples_per_prompt`
        samples on average."""
        base = self._settings.base_samples_per_prompt
        groups = await self._ask(step, prompts, prompts, [range(base)] * len(prompts))
        self._num_given += base * len(prompts)
        seeded = _SeededPrompts(self._seeding, groups)
        left = (self._mean_size - base) * len(prompts)
        while left > 0:
            count = min(left, self._settings.samples_per_round or len(prompts))
            granted = self._grants(groups, count)
            await self._sample_more(step, groups, granted, seeded)
            self._num_given += count
            self._num_rounds += 1
            left -= count
        self._sizes += [len(group.rewards) for group in groups]
        return groups

    async def _sample_more(
        self,
        step: int,
        groups: list[ScoredGroup],
        granted: np.ndarray,
        seeded: "_SeededPrompts",
    ) -> None:
        """Add `granted` samples, int [Q], to the groups."""
        numbers = np.flatnonzero(granted).tolist()
        prompts = []
        asked = []
        samples = []
        for number in numbers:
            size = len(groups[number].rewards)
            prompts.append(groups[number].group.prompt)
            asked.append(seeded.prompt_of(number))
            samples.append(range(size, size + int(granted[number])))
        found = await self._ask(step, prompts, asked, samples)
        for number, more in zip(numbers, found, strict=True):
            groups[number] = joined(groups[number], more)

    def _grants(self, groups: Sequence[ScoredGroup], count: int) -> np.ndarray:
        deviations = []
        for group in groups:
            deviations.append(_deviation(self._filter.with_statistics(group).rewards))
        return grants(
            np.array(deviations),
            np.array([len(group.rewards) for group in groups]),
            count,
            num_given=self._num_given,
            most=self._most,
            alpha=self._settings.alpha,
            bonus=self._settings.bonus,
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what was allocated since the last call, which is made once a step."""
        metrics = {"allocation/rounds": float(self._num_rounds)}
        if self._sizes:
            sizes = np.array(self._sizes)
            metrics["allocation/group_size_min"] = float(sizes.min())
            metrics["allocation/group_size_max"] = float(sizes.max())
            metrics["allocation/group_size_std"] = float(sizes.std())
            metrics["allocation/at_maximum_fraction"] = float((sizes == self._most).mean())
        self._num_given = 0
        self._num_rounds = 0
        self._sizes = []
        return metrics


class _SeededPrompts:
    """What is asked from the second round on: of prompts whose base was all wrong, a seeded one.
    Each is made once, when it is first asked for."""

    def __init__(self, seeding: Seeding | None, groups: Sequence[ScoredGroup]):
        self._seeding = seeding
        self._prompts = [group.group.prompt for group in groups]
        self._waiting: set[int] = set()  # those that are yet to be seeded
        if seeding is not None:
            for number, group in enumerate(groups):
                if seeding.is_wanted(group):
                    self._waiting.add(number)

    def prompt_of(self, number: int) -> Prompt:
        if number in self._waiting:
            assert self._seeding is not None  # or nothing would wait
            self._waiting.remove(number)
            self._prompts[number] = self._seeding.seeded(self._prompts[number])
        return self._prompts[number]


def grants(
    deviations: np.ndarray,
    sizes: np.ndarray,
    count: int,
    *,
    num_given: int,
    most: int,
    alpha: float,
    bonus: float,
) -> np.ndarray:
    """Return how many of the next `count` samples each prompt gets, int [Q]; among equal priorities
    the first prompt is taken.

    deviations: of rewards, float64 [Q], kept; sizes: samples that the prompts have, int [Q], at
    least 2, and room for `count` more up to `most`; num_given: T."""
    sizes = sizes.copy()
    before = sizes.copy()
    for given in range(num_given, num_given + count):
        priorities = reduction(deviations, sizes, alpha)
        priorities += bonus * np.sqrt(math.log(1 + given) / sizes)
        priorities[sizes >= most] = -np.inf
        sizes[priorities.argmax()] += 1
    granted: np.ndarray = sizes - before
    return granted


def reduction(deviations: np.ndarray, sizes: np.ndarray, alpha: float) -> np.ndarray:
    """Return by how much one more sample narrows the half-width, h(n) - h(n + 1), float64 [Q]."""
    factors = []
    for size in sizes.tolist():
        factors.append(_half_width(size, alpha) - _half_width(size + 1, alpha))
    reductions: np.ndarray = deviations * np.array(factors)
    return reductions


@cache
def _half_width(size: int, alpha: float) -> float:
    """Return half the width of Student's interval of the mean of `size` samples with deviation
    1."""
    return student_t(1 - alpha / 2, size - 1) / math.sqrt(size)


def student_t(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for a probability of at least 1/2 and whole degrees of
    freedom.

    P(|t| <= x) is a finite sum of powers of cos(theta), theta = atan(x / sqrt(freedom)) (Abramowitz
    and Stegun 26.7.3 and 26.7.4); theta is found by bisection."""
    inside = 2 * probability - 1
    low = 0.0
    high = math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if _mass_inside(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _mass_inside(theta: float, freedom: int) -> float:
    """P(|t| <= sqrt(freedom) tan(theta))."""
    cosine = math.cos(theta)
    is_odd = freedom % 2 == 1
    term = 1.0
    if is_odd:
        term = cosine
    total = 0.0
    for power in range(int(is_odd), freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    if is_odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def _deviation(rewards: np.ndarray) -> float:
    """Sample deviation of the scored rewards; 0 where fewer than two are scored."""
    scored = rewards[~np.isnan(rewards)]
    if len(scored) < 2:
        return 0.0
    return float(scored.std(ddof=1))


def joined(first: ScoredGroup, more: ScoredGroup) -> ScoredGroup:
    """Join samples of one prompt into one group; its engine is that of the first."""
    components = {}
    for name, values in first.components.items():
        components[name] = np.concatenate([values, more.components[name]])
    steps = (*_steps_of(first), *_steps_of(more))
    if not any(steps):
        steps = ()
    completions = (*first.group.completions, *more.group.completions)
    return ScoredGroup(
        replace(first.group, completions=completions),
        components,
        np.concatenate([first.rewards, more.rewards]),
        steps,
    )


def _steps_of(group: ScoredGroup) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Step rewards of every sample, also where no sample has any."""
    return group.steps or ((),) * len(group.rewards)
