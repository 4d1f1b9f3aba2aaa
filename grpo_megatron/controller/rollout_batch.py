"""The groups of one RL step: drawn, sampled, scored, selected and counted."""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo_megatron.config.run import SamplingConfig
from grpo_megatron.controller.correction import Correction
from grpo_megatron.controller.dataset import DatasetAnswers
from grpo_megatron.controller.display import show
from grpo_megatron.controller.group_filter import GroupFilter, by_domain, not_older, rollout_metrics
from grpo_megatron.controller.session import Session
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.rollout.worker import RolloutWorker
from grpo_megatron.types import Prompt, ScoredGroup


@dataclass(frozen=True)
class SampledStep:
    """The groups of one step, and what is known about its sampling."""

    groups: list[ScoredGroup]  # to train, maybe none
    metrics: dict[str, float]  # of what was sampled, before any correction and selection
    rollout_s: float
    dropped_rewards: dict[str, list[float]]  # by domain, of groups that the rules did not keep


class RolloutBatchBuilder:
    """Yields the groups of step after step.

    Kept groups beyond the target go into the next step. They are held in memory only: after a
    crash their prompts come again in a later epoch, like those of rejected groups."""

    def __init__(self, session: Session, sampler: PromptSampler):
        config = session.config
        self._session = session
        self._sampler = sampler
        self._filter = GroupFilter(config)
        self._answers: RolloutWorker | DatasetAnswers = session.worker
        if config.uses_dataset:
            self._answers = DatasetAnswers(session.tokenizer, config.rollout.max_new_tokens)
        self._surplus: list[ScoredGroup] = []
        self._correction: Correction | None = None
        if config.correction is not None:
            self._correction = Correction(session, config.correction, self._filter)
        self._rollout_s = 0.0
        self._first_tries: list[ScoredGroup] = []
        """Of the step that is sampled: everything before any correction."""

    async def groups_of(self, step: int) -> SampledStep:
        """Sample `step`; moves the sampler and its curriculum."""
        batch = self._session.config.batch
        settings = self._session.config.sampling
        self._session.rewards.take_metrics()  # of evaluations
        self._rollout_s = 0.0
        self._first_tries = []

        kept, sampled, num_rounds = await fill_batch(
            settings,
            batch.num_prompts,
            self._sampler.acceptance,
            self._surplus,
            self._sampler.draw,
            partial(self._score, step),
            self._filter.keeps,
        )
        groups = kept[: batch.num_prompts]
        surplus = kept[batch.num_prompts :]
        # decided now, not when they are due: a resumed run then counts the same
        oldest = step + 1 - batch.max_staleness - settings.surplus_staleness
        self._surplus = not_older(surplus, oldest)
        if not groups:
            show(
                "message",
                text=f"step {step}: none of {len(sampled)} groups was kept: nothing is trained "
                "(group/all_correct_fraction and all_wrong_fraction tell why)",
            )

        self._tell_curriculum()
        metrics = self._metrics(groups, sampled)
        metrics["sampling/rounds"] = num_rounds
        metrics["sampling/surplus"] = len(surplus)
        metrics["sampling/stale_dropped"] = len(surplus) - len(self._surplus)
        metrics["sampling/missing"] = batch.num_prompts - len(groups)
        metrics["sampling/skipped_steps"] = not groups
        if sampled:
            self._sampler.acceptance = metrics["sampling/acceptance_rate"]
        return SampledStep(
            groups,
            {name: float(value) for name, value in metrics.items()},
            self._rollout_s,
            dropped_rewards(self._filter, sampled),
        )

    async def _score(self, step: int, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """One round: sampled, scored and corrected groups of `prompts`."""
        phase = self._session.phase
        phase.sampling("rollout")
        started = time.perf_counter()
        groups = await self._answers.rollouts(step, prompts)
        self._rollout_s += time.perf_counter() - started
        phase.sampling("reward")
        scored = await self._session.rewards.score(groups)
        self._first_tries += scored
        if self._correction is None:
            return scored
        return await self._correction(step, scored)

    def _tell_curriculum(self) -> None:
        for group in self._first_tries:
            correct = self._filter.correct(group)
            if not np.isnan(correct).all():
                self._sampler.observe(group.group.prompt, float(np.nanmean(correct)))

    def _metrics(
        self, groups: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Of what was sampled, before any correction and filter. groups: those to train; sampled:
        those of this step, corrected."""
        seen = self._first_tries or groups
        metrics: dict[str, float] = {}
        metrics |= by_domain(rollout_metrics, seen)
        metrics |= by_domain(self._filter.metrics, seen)
        metrics |= self._sampler.metrics()
        metrics |= self._session.rewards.take_metrics()
        if self._correction is not None:  # acceptance is that of the corrected groups
            metrics |= self._correction.take_metrics()
            corrected = by_domain(self._filter.metrics, sampled or groups)
            for name, value in corrected.items():
                if name.startswith("sampling/"):
                    metrics[name] = value
        return metrics


def dropped_rewards(
    group_filter: GroupFilter, sampled: Sequence[ScoredGroup]
) -> dict[str, list[float]]:
    """Rewards by domain of the groups that are not kept, as group statistics see them; unscorable
    ones are left out."""
    found: dict[str, list[float]] = {}
    for group in sampled:
        if group_filter.keeps(group):
            continue
        rewards = group_filter.with_statistics(group).rewards
        of_domain = found.setdefault(group.group.prompt.domain, [])
        of_domain += rewards[~np.isnan(rewards)].tolist()
    return found


async def fill_batch(
    settings: SamplingConfig,
    target: int,
    acceptance: float,
    carried: Sequence[ScoredGroup],
    draw: Callable[[int, Collection[str] | None], Sequence[Prompt]],
    score: Callable[[Sequence[Prompt]], Awaitable[list[ScoredGroup]]],
    keeps: Callable[[ScoredGroup], bool],
) -> tuple[list[ScoredGroup], list[ScoredGroup], int]:
    """Sample until `target` groups are kept or rounds run out (DAPO, arXiv:2503.14476).

    A round draws missing / acceptance prompts, within `max_oversampling`; the expected acceptance
    is replaced by what this step observes. Without `settings.dynamic` there is one round. Returns
    kept groups, the carried first, maybe more than `target`; all groups sampled here; rounds."""
    kept = list(carried)
    sampled: list[ScoredGroup] = []
    num_rounds = 0
    used = {group.group.prompt.prompt_id for group in carried}
    while len(kept) < target and num_rounds <= settings.max_refill_rounds * settings.dynamic:
        missing = target - len(kept)
        if sampled:
            acceptance = (len(kept) - len(carried)) / len(sampled)
        size = math.ceil(missing * min(settings.max_oversampling, 1 / max(acceptance, 1e-9)))
        prompts = draw(size, used) if settings.dynamic else draw(missing, None)
        if not prompts:  # the step has had every prompt
            break
        used |= {prompt.prompt_id for prompt in prompts}
        groups = await score(prompts)
        sampled += groups
        kept += filter(keeps, groups)
        num_rounds += 1
    return kept, sampled, num_rounds
