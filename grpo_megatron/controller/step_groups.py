"""The groups of one RL step: drawn, sampled, scored, selected and counted."""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.config.run import SamplingConfig
from grpo_megatron.controller.correction import Correction
from grpo_megatron.controller.dataset import DatasetAnswers
from grpo_megatron.controller.display import show
from grpo_megatron.controller.selection import Selection, by_domain, not_older, rollout_metrics
from grpo_megatron.controller.session import Session
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.types import Prompt, ScoredGroup


@dataclass(frozen=True)
class SampledStep:
    """The groups of one step, and what is known about its sampling."""

    groups: list[ScoredGroup]  # to train, maybe none
    metrics: dict[str, float]  # of what was sampled, before any correction and selection
    rollout_s: float
    dropped_rewards: dict[str, list[float]]  # by domain, of groups that the rules did not keep


class GroupSource:
    """Yields the groups of step after step.

    Kept groups beyond the target go into the next step. They are held in memory only: after a
    crash their prompts come again in a later epoch, like those of rejected groups."""

    def __init__(self, session: Session, sampler: PromptSampler):
        self._session, self._sampler = session, sampler
        self._selection = Selection(session.config)
        self._answers = (
            session.worker
            if not session.config.uses_dataset
            else DatasetAnswers(session.tokenizer, session.config.rollout.max_new_tokens)
        )
        self._surplus: list[ScoredGroup] = []
        self._correction = (
            Correction(session, self._selection) if session.config.correction else None
        )

    async def groups_of(self, step: int) -> SampledStep:
        """Sample `step`; moves the sampler and its curriculum."""
        session, sampler, selection = self._session, self._sampler, self._selection
        batch, settings = session.config.batch, session.config.sampling
        rollout_s, first_tries = 0.0, []
        session.rewards.take_metrics()  # of evaluations

        async def score(prompts: Sequence[Prompt]) -> list[ScoredGroup]:
            nonlocal rollout_s
            session.phase.sampling("rollout")
            started = time.perf_counter()
            groups = await self._answers.rollouts(step, prompts)
            rollout_s += time.perf_counter() - started
            session.phase.sampling("reward")
            scored = await session.rewards.score(groups)
            first_tries.extend(scored)
            return await self._correction(step, scored) if self._correction else scored

        kept, sampled, num_rounds = await fill_batch(
            settings,
            batch.num_prompts,
            sampler.acceptance,
            self._surplus,
            sampler.draw,
            score,
            selection.keeps,
        )
        groups, surplus = kept[: batch.num_prompts], kept[batch.num_prompts :]
        if not groups:
            show(
                "message",
                text=f"step {step}: none of {len(sampled)} groups was kept: nothing is "
                "trained (group/all_correct_fraction and all_wrong_fraction tell "
                "why)",
            )
        # decided now, not when they are due: a resumed run then counts the same
        oldest = step + 1 - batch.max_staleness - settings.surplus_staleness
        self._surplus = not_older(surplus, oldest)
        for group in first_tries:
            if not np.isnan(correct := selection.correct(group)).all():
                sampler.observe(group.group.prompt, float(np.nanmean(correct)))

        seen = first_tries or groups
        metrics = (
            by_domain(rollout_metrics, seen)
            | by_domain(selection.metrics, seen)
            | sampler.metrics()
            | session.rewards.take_metrics()
            | {
                "sampling/rounds": num_rounds,
                "sampling/surplus": len(surplus),
                "sampling/stale_dropped": len(surplus) - len(self._surplus),
                "sampling/missing": batch.num_prompts - len(groups),
                "sampling/skipped_steps": not groups,
            }
        )
        if self._correction:  # acceptance is that of the corrected groups
            metrics |= self._correction.take_metrics() | {
                name: value
                for name, value in by_domain(selection.metrics, sampled or groups).items()
                if name.startswith("sampling/")
            }
        if sampled:
            sampler.acceptance = metrics["sampling/acceptance_rate"]
        return SampledStep(
            groups,
            {name: float(value) for name, value in metrics.items()},
            rollout_s,
            dropped_rewards(selection, sampled),
        )


def dropped_rewards(selection: Selection, sampled: Sequence[ScoredGroup]) -> dict[str, list[float]]:
    """Rewards by domain of the groups that are not kept, as group statistics see them; unscorable
    ones are left out."""
    found: dict[str, list[float]] = {}
    for group in sampled:
        if selection.keeps(group):
            continue
        rewards = selection.with_statistics(group).rewards
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
    kept, sampled, num_rounds = list(carried), [], 0
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
