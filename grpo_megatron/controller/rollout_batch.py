"""The samples of one RL step: drawn, sampled, scored, selected, counted and recorded."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batching.manifest import StepFacts, is_recorded, read_manifest
from grpo_megatron.config.run import RunConfig, SamplingConfig
from grpo_megatron.controller.allocation import Allocation
from grpo_megatron.controller.correction import Correction
from grpo_megatron.controller.dataset_rollouts import DatasetRollouts
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.exemplars import ExemplarStore
from grpo_megatron.controller.group_filter import (
    GroupFilter,
    by_domain,
    not_older,
    outcome_metrics,
    rollout_metrics,
    staleness,
)
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.controller.seeding import Seeding
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.data.dataset_answers import DatasetAnswers
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.workers import RolloutWorkers
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.samples import extremes
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup, StoredCompletion


@dataclass
class RecordedStep:
    """A step whose samples are in the store."""

    step: int
    directory: Path
    facts: StepFacts
    seconds: dict[str, float] = field(default_factory=dict)  # of its sampling, by phase
    logprob_check: dict[str, float] = field(default_factory=dict)  # its metrics, if one was made
    fresh: bool = False  # sampled just now


class StepSampler:
    """Gives step after step: from the store, or else from the engines and into the store.

    Attributes:
        sampler: Draws the prompts.
        ahead: Whether a step is sampled while the one before trains, by older weights."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        *,
        sampler: PromptSampler,
        exemplars: ExemplarStore | None,
        batches: "RolloutBatchBuilder",
        publisher: Publisher,
        judges: EngineControl,
        teachers: ServedTeachers,
        tokenizer: TextTokenizer,
    ):
        self._config = config
        self._run_dir = run_dir
        self.sampler = sampler
        self._batches = batches
        self._exemplars = exemplars
        self._publisher = publisher
        self._judges = judges
        self._teachers = teachers
        self._tokenizer = tokenizer
        self.ahead = config.batch.max_staleness > 0

    async def sample(self, step: int) -> RecordedStep:
        """Return step `step`, recorded; one that the store has is never sampled again."""
        directory = self._run_dir.step_store(step)
        if is_recorded(directory):
            recorded = read_manifest(directory)
            load_sampling(recorded.sampler, self.sampler, self._exemplars)  # its answers decided
            return RecordedStep(step, directory, recorded)

        started = time.perf_counter()
        await self._judges.resume()
        version = step  # of the weights that sample
        if self.ahead:
            version = self._publisher.version
        sampled = await self._batches.groups_of(step)
        facts = self._facts(step, version, sampled)
        scored_at = time.perf_counter()

        groups = [scored.group for scored in sampled.groups]
        teacher_logprobs = await self._teachers.answers(groups)
        written_from = time.perf_counter()
        await asyncio.to_thread(
            record_step,
            directory,
            sampled.groups,
            self._config.batch.updates_per_rollout,
            facts,
            self._tokenizer.decode,
            teacher_logprobs,
        )

        waited = 0.0  # for the weights
        if not self.ahead:
            waited = max(0.0, self._publisher.resumed_at - started)
        seconds = {
            "rollout": sampled.rollout_s - waited + time.perf_counter() - written_from,
            "reward": scored_at - started - sampled.rollout_s,
        }
        if teacher_logprobs:
            seconds["teachers"] = written_from - scored_at
        return RecordedStep(step, directory, facts, seconds, fresh=True)

    def _facts(self, step: int, version: int, sampled: "SampledStep") -> StepFacts:
        config = self._config
        groups = sampled.groups
        is_stale = version < step or len(not_older(groups, step)) < len(groups)
        verified_replicas: set[int] = set()
        if not is_stale:
            verified_replicas = {scored.group.replica for scored in groups}
        dropped: dict[str, list[float]] = {}
        if config.objective.advantage_std == "batch_raw":
            dropped = sampled.dropped_rewards
        return StepFacts(
            kind="rl",
            step=step,
            version=version,
            stale=is_stale,
            domains=[domain.name for domain in config.domains],
            verified_replicas=sorted(verified_replicas),
            sampler=sampling_state(self.sampler, self._exemplars),
            metrics=sampled.metrics | by_domain(lambda part: staleness(part, step), groups),
            extremes=extremes(step, groups, config.telemetry.samples_per_step),
            dropped_rewards=dropped,
        )


def sampling_state(sampler: PromptSampler, exemplars: ExemplarStore | None) -> dict[str, Any]:
    """What a checkpoint and a recorded step keep: the prompts that come next, and the exemplars."""
    state = sampler.state_dict()
    if exemplars is not None:
        state["exemplars"] = exemplars.state_dict()
    return state


def load_sampling(
    state: Mapping[str, Any], sampler: PromptSampler, exemplars: ExemplarStore | None
) -> None:
    """Continue from what `sampling_state` returned; without exemplars where it has none."""
    sampler.load_state_dict(state)
    if exemplars is not None and "exemplars" in state:
        exemplars.load_state_dict(state["exemplars"])


@dataclass(frozen=True)
class SampledStep:
    """The groups of one step, and what is known about its sampling."""

    groups: list[ScoredGroup]  # to train, maybe none
    metrics: dict[str, float]  # of what was sampled, before any correction and selection
    rollout_s: float
    dropped_rewards: dict[str, list[float]]  # by domain, of groups that the rules did not keep


class RolloutBatchBuilder:
    """Yields the groups of step after step.

    Kept groups beyond the target go into the next step. They are not in the store yet: after a
    crash their prompts come again in a later epoch, like those of rejected groups."""

    def __init__(
        self,
        config: RunConfig,
        *,
        sampler: PromptSampler,
        exemplars: ExemplarStore | None,
        workers: RolloutWorkers,
        spool: Path,
        rewards: RewardPool,
        tokenizer: TextTokenizer,
        phases: Phases,
    ):
        self._config = config
        self._sampler = sampler
        self._rewards = rewards
        self._phases = phases
        self._filter = GroupFilter(config)
        self._workers = workers
        self._answers: RolloutWorkers | DatasetRollouts = workers
        if config.uses_dataset:
            answers = DatasetAnswers(config.domains, tokenizer, config.rollout.max_new_tokens)
            self._answers = DatasetRollouts(answers, spool, recorded_shape(config))
        self._correction: Correction | None = None
        if config.correction is not None:
            self._correction = Correction(
                config,
                config.correction,
                group_filter=self._filter,
                workers=workers,
                rewards=rewards,
                tokenizer=tokenizer,
            )
        self._seeding: Seeding | None = None
        if config.seeding is not None and exemplars is not None:
            self._seeding = Seeding(
                config,
                config.seeding,
                exemplars=exemplars,
                group_filter=self._filter,
                tokenizer=tokenizer,
            )
        self._allocation: Allocation | None = None
        if config.allocation is not None:
            self._allocation = Allocation(
                config,
                config.allocation,
                ask=self._ask,
                group_filter=self._filter,
                seeding=self._seeding,
            )
        self._surplus: list[ScoredGroup] = []
        self._rollout_s = 0.0
        self._first_tries: list[ScoredGroup] = []
        """Of the step that is sampled: everything before any correction."""

    async def groups_of(self, step: int) -> SampledStep:
        """Sample `step`; moves the sampler and its curriculum."""
        batch = self._config.batch
        settings = self._config.sampling
        self._rewards.take_metrics()  # of evaluations
        self._workers.take_metrics()
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
        if self._allocation is not None:
            scored = await self._allocation.sample(step, prompts)
        else:
            groups = await self._sampled(self._answers.rollouts(step, prompts))
            scored = await self._rewards.score(groups)
        self._first_tries += scored
        if self._correction is None:
            return scored
        return await self._correction.retry(step, scored)

    async def _ask(
        self,
        step: int,
        prompts: Sequence[Prompt],
        asked: Sequence[Prompt],
        samples: Sequence[range],
    ) -> list[ScoredGroup]:
        """Samples of the prompts `asked`, scored as answers to `prompts`."""
        groups = await self._sampled(self._workers.rollouts(step, asked, samples=samples))
        answers = []
        for group, prompt in zip(groups, prompts, strict=True):
            answers.append(group.as_answers_to(prompt))
        return await self._rewards.score(answers)

    async def _sampled(
        self, rollouts: Awaitable[list[RolloutGroup[StoredCompletion]]]
    ) -> list[RolloutGroup[StoredCompletion]]:
        """What `rollouts` gives; its time is counted, and what comes next is shown as rewards."""
        self._phases.show_sampling("rollout")
        started = time.perf_counter()
        groups = await rollouts
        self._rollout_s += time.perf_counter() - started
        self._phases.show_sampling("reward")
        return groups

    def _tell_curriculum(self) -> None:
        for group in self._first_tries:
            correct = self._filter.unaided(group)
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
        metrics |= self._rewards.take_metrics()
        metrics |= self._workers.take_metrics()
        metrics |= outcome_metrics(seen)
        if self._allocation is not None:
            metrics |= self._allocation.take_metrics()
        if self._seeding is not None:
            metrics |= self._seeding.finish_step(self._first_tries)
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
    max_rounds = 1
    if settings.dynamic:
        max_rounds += settings.max_refill_rounds
    used = {group.group.prompt.prompt_id for group in carried}
    while len(kept) < target and num_rounds < max_rounds:
        missing = target - len(kept)
        if sampled:
            acceptance = (len(kept) - len(carried)) / len(sampled)
        if settings.dynamic:
            oversampling = min(settings.max_oversampling, 1 / max(acceptance, 1e-9))
            prompts = draw(math.ceil(missing * oversampling), used)
        else:
            prompts = draw(missing, None)
        if not prompts:  # the step has had every prompt
            break
        used |= {prompt.prompt_id for prompt in prompts}
        groups = await score(prompts)
        sampled += groups
        kept += [group for group in groups if keeps(group)]
        num_rounds += 1
    return kept, sampled, num_rounds
