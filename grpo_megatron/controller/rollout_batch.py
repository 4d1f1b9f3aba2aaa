"""The samples of one RL step: drawn, sampled, scored, selected, counted and recorded."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.batching.manifest import StepFacts, is_recorded, read_manifest
from grpo_megatron.config.run import RunConfig, SamplingConfig
from grpo_megatron.controller.allocation import Allocation
from grpo_megatron.controller.busy_clock import BusyClock
from grpo_megatron.controller.correction import Correction
from grpo_megatron.controller.dataset_rollouts import DatasetRollouts
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.exemplars import ExemplarStore
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.recorded_step import RecordedStep
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.controller.sampling_metrics import by_domain, outcome_metrics, rollout_metrics
from grpo_megatron.controller.seeding import Seeding
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.controller.staleness_watch import SampledSeconds, answers_of
from grpo_megatron.controller.token_ages import (
    count_tokens_before,
    staleness,
    with_tokens_since,
    without_tokens_before,
)
from grpo_megatron.data.dataset_answers import DatasetAnswers
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.rundir import RunDir, engine_name
from grpo_megatron.telemetry.samples import extremes
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup, StoredCompletion


class StepSampler:
    """Gives step after step: from the store, or else from the engines and into the store.

    Attributes:
        sampler: Draws the prompts.
        ahead: Whether a step is sampled while one before it trains, by older weights."""

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

    async def sample(
        self,
        step: int,
        *,
        on_drawn: Callable[[], None] = lambda: None,
        before_recording: Callable[[], Awaitable[None]] | None = None,
    ) -> RecordedStep:
        """Return step `step`, recorded; one that the store has is never sampled again.

        on_drawn: called when this step has drawn all of its prompts, at the latest before it
        returns; the next step may draw then. before_recording: waits until this step may get into
        the store."""
        directory = self._run_dir.step_store(step)
        if is_recorded(directory):
            recorded = read_manifest(directory)
            # the step's answers may have decided what is drawn next
            load_sampling(recorded.sampler, self.sampler, self._exemplars)
            on_drawn()
            return RecordedStep(step, directory, recorded)

        started = time.perf_counter()
        await self._judges.resume()
        version = step  # of the weights that sample
        if self.ahead:
            version = self._publisher.version
        sampled = await self._batches.groups_of(step, on_drawn)
        facts = self._facts(step, version, sampled)
        scored_at = time.perf_counter()

        groups = [scored.group for scored in sampled.groups]
        teacher_logprobs = await self._teachers.answers(groups)
        answered_at = time.perf_counter()
        if before_recording is not None:
            await before_recording()
        recording_began = time.perf_counter()
        await asyncio.to_thread(self._record, directory, sampled.groups, facts, teacher_logprobs)
        record_s = time.perf_counter() - recording_began

        generation_s = sampled.busy_s
        if not self.ahead:  # requests that went out early waited for the weights
            generation_s -= max(0.0, self._publisher.resumed_at - started)
        reward_s = scored_at - started - sampled.rollout_s
        teachers_s = answered_at - scored_at
        seconds = {"rollout": generation_s + record_s, "reward": reward_s}
        if teacher_logprobs:
            seconds["teachers"] = teachers_s
        sampling = SampledSeconds(
            generation_s=generation_s,
            reward_s=reward_s + teachers_s,
            record_s=record_s,
            answers=answers_of(sampled.groups),
        )
        return RecordedStep(step, directory, facts, seconds, fresh=True, sampling=sampling)

    def _record(
        self,
        directory: Path,
        groups: Sequence[ScoredGroup],
        facts: StepFacts,
        teacher_logprobs: Mapping[str, np.ndarray],
    ) -> None:
        """Write the step into the store."""
        record_step(
            directory,
            groups,
            self._config.batch.updates_per_rollout,
            facts,
            self._tokenizer.decode,
            teacher_logprobs,
            images=ImageFolder(self._run_dir.images),
        )

    def _facts(self, step: int, version: int, sampled: "SampledStep") -> StepFacts:
        """Return what the manifest says of the step; weights of `version` began to sample it."""
        config = self._config
        groups = sampled.groups
        has_older_tokens = len(without_tokens_before(groups, step)) < len(groups)
        is_stale = version < step or has_older_tokens
        verified_replicas: set[int] = set()
        if not is_stale:
            verified_replicas = {scored.group.replica for scored in groups}
        dropped: dict[str, list[float]] = {}
        if config.objective.advantage_std == "batch_raw":
            dropped = sampled.dropped_rewards
        of_ages = by_domain(lambda part: staleness(part, step), groups)
        return StepFacts(
            kind="rl",
            step=step,
            version=version,
            stale=is_stale,
            domains=[domain.name for domain in config.domains],
            verified_replicas=sorted(verified_replicas),
            engines=[engine_name(scored.group.replica) for scored in groups],
            sampler=sampled.sampler,
            metrics=sampled.metrics | of_ages,
            extremes=extremes(
                step, groups, config.telemetry.samples_per_step, self._tokenizer.decode_exactly
            ),
            dropped_rewards=dropped,
            oldest_trained=sampled.oldest_trained,
        )


def sampling_state(sampler: PromptSampler, exemplars: ExemplarStore | None) -> dict[str, Any]:
    """Return what a checkpoint and a recorded step keep: the prompts that come next, and the
    exemplars."""
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
    busy_s: float  # of rollouts, none counted by two steps that were sampled at once
    dropped_rewards: dict[str, list[float]]  # by domain, of groups that the rules did not keep
    sampler: dict[str, Any]  # state after the step's draws
    oldest_trained: int | None  # as of `StepFacts`


@dataclass
class _OpenStep:
    """A step that is being sampled."""

    rollout_s: float = 0.0
    first_tries: list[ScoredGroup] = field(default_factory=list)
    """Everything before any correction."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State after the step's draws; empty before."""


class FilledBatch(NamedTuple):
    """What `fill_batch` found."""

    kept: list[ScoredGroup]  # the carried ones first, maybe more than were wanted
    sampled: list[ScoredGroup]  # by these rounds, kept or not
    num_rounds: int


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
        dispatcher: ChunkDispatcher,
        spool: Path,
        rewards: RewardPool,
        tokenizer: TextTokenizer,
        phases: Phases,
    ):
        self._config = config
        self._sampler = sampler
        self._exemplars = exemplars
        self._rewards = rewards
        self._phases = phases
        self._filter = GroupFilter(config)
        self._dispatcher = dispatcher
        self._answers: ChunkDispatcher | DatasetRollouts = dispatcher
        if config.uses_dataset:
            answers = DatasetAnswers.of_run(config, tokenizer)
            self._answers = DatasetRollouts(answers, spool, recorded_shape(config))
        self._correction: Correction | None = None
        if config.correction is not None:
            self._correction = Correction(
                config,
                config.correction,
                group_filter=self._filter,
                dispatcher=dispatcher,
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
        self._draws_at_once = config.steps_sampled_at_once > 1
        self._open: dict[int, _OpenStep] = {}
        self._busy = BusyClock()

    async def groups_of(self, step: int, on_drawn: Callable[[], None]) -> SampledStep:
        """Sample `step`: rounds of prompts, answered and scored, until enough groups are kept.

        The sampler and its curriculum move on. `on_drawn` is called when the step will draw no more
        prompts."""
        opened = _OpenStep()

        def end_draws() -> None:
            opened.sampler = sampling_state(self._sampler, self._exemplars)
            on_drawn()

        filled = await self._fill(step, opened, end_draws)
        num_prompts = self._config.batch.num_prompts
        groups = filled.kept[:num_prompts]
        surplus = filled.kept[num_prompts:]
        # decided now, not when they are due: a resumed run then counts the same
        self._surplus = self._young_enough(surplus, self._oldest_allowed(step + 1))
        if not groups:
            _show_empty_step(step, len(filled.sampled))

        self._update_curriculum(opened.first_tries)
        metrics = self._metrics(opened.first_tries, groups, filled.sampled)
        metrics |= self._age_metrics(step, groups, filled.sampled)
        metrics |= {
            "sampling/rounds": filled.num_rounds,
            "sampling/surplus": len(surplus),
            "sampling/stale_dropped": len(surplus) - len(self._surplus),
            "sampling/missing": num_prompts - len(groups),
            "sampling/skipped_steps": not groups,
        }
        if not self._draws_at_once:
            if filled.sampled:
                self._sampler.acceptance = metrics["sampling/acceptance_rate"]
            end_draws()
        oldest_trained = None
        if metrics.get("staleness/masked_tokens"):
            oldest_trained = self._oldest_allowed(step)
        return SampledStep(
            groups=groups,
            metrics={name: float(value) for name, value in metrics.items()},
            rollout_s=opened.rollout_s,
            busy_s=self._busy.take(),
            dropped_rewards=self._filter.dropped_rewards(filled.sampled),
            sampler=opened.sampler,
            oldest_trained=oldest_trained,
        )

    async def _fill(
        self, step: int, opened: _OpenStep, end_draws: Callable[[], None]
    ) -> FilledBatch:
        """Draw prompts, have them answered and scored, until enough groups are kept.

        end_draws: called after the draw, where there is but one; its answers then decide nothing
        about the draws of later steps."""
        if not self._open:  # what was counted so far is of evaluations
            self._rewards.take_metrics()
            self._dispatcher.take_metrics()
        self._open[step] = opened

        def draw(count: int, exclude: Collection[str] | None) -> list[Prompt]:
            prompts = self._sampler.draw(count, exclude)
            if self._draws_at_once:
                end_draws()
            return prompts

        try:
            return await fill_batch(
                self._config.sampling,
                target=self._config.batch.num_prompts,
                acceptance=self._sampler.acceptance,
                carried=self._surplus,
                draw=draw,
                score=partial(self._score, step),
                keeps=partial(self._keeps, step),
            )
        finally:
            del self._open[step]

    def _oldest_allowed(self, step: int) -> int:
        """Return the oldest weight version whose tokens `step` may train."""
        return step - self._config.batch.max_staleness - self._config.sampling.surplus_staleness

    def _young_enough(self, groups: Sequence[ScoredGroup], oldest: int) -> list[ScoredGroup]:
        """Return the groups without a token of weights before `oldest`; where such tokens are
        masked, the groups with a token that is not."""
        if self._config.batch.too_old == "mask":
            return with_tokens_since(groups, oldest)
        return without_tokens_before(groups, oldest)

    def _keeps(self, step: int, group: ScoredGroup) -> bool:
        """Whether `step` trains a group that was sampled for it."""
        return self._filter.keeps(group) and not self._is_too_old(step, group)

    def _is_too_old(self, step: int, group: ScoredGroup) -> bool:
        if self._config.batch.max_staleness == 0:
            return False
        return not self._young_enough([group], self._oldest_allowed(step))

    def _age_metrics(
        self, step: int, groups: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Count what `step` leaves out because it is too old: tokens of `groups`, which it trains,
        and samples of whole groups; empty where rollouts do not run ahead."""
        if self._config.batch.max_staleness == 0:
            return {}
        num_dropped = 0
        for group in sampled:
            if self._is_too_old(step, group) and self._filter.keeps(group):
                num_dropped += len(group.rewards)
        return {
            "staleness/masked_tokens": count_tokens_before(groups, self._oldest_allowed(step)),
            "staleness/dropped_samples": num_dropped,
        }

    async def _score(self, step: int, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Run one round: have `prompts` answered, scored and corrected; returns their groups."""
        if self._allocation is not None:
            scored = await self._allocation.sample(step, prompts)
        else:
            groups = await self._timed(step, self._answers.rollouts(step, prompts))
            scored = await self._rewards.score(groups)
        self._open[step].first_tries += scored
        if self._correction is None:
            return scored
        return await self._correction.retry(step, scored)

    async def _ask(
        self,
        step: int,
        prompts: Sequence[Prompt],
        sent_prompts: Sequence[Prompt],
        samples: Sequence[range],
    ) -> list[ScoredGroup]:
        """Sample answers to `sent_prompts` (`prompts`, maybe with exemplars before them), and score
        them as answers to `prompts`. samples: as of `ChunkDispatcher.rollouts`."""
        rollouts = self._dispatcher.rollouts(step, sent_prompts, samples=samples)
        groups = await self._timed(step, rollouts)
        answers = []
        for group, prompt in zip(groups, prompts, strict=True):
            answers.append(group.as_answers_to(prompt))
        return await self._rewards.score(answers)

    async def _timed(
        self, step: int, rollouts: Awaitable[list[RolloutGroup[StoredCompletion]]]
    ) -> list[RolloutGroup[StoredCompletion]]:
        """Wait for `rollouts` and count the time; what comes next is shown as rewards."""
        self._phases.show_sampling("rollout")
        started = time.perf_counter()
        self._busy.begin()
        try:
            groups = await rollouts
        finally:
            self._busy.end()
        self._open[step].rollout_s += time.perf_counter() - started
        self._phases.show_sampling("reward")
        return groups

    def _update_curriculum(self, first_tries: Sequence[ScoredGroup]) -> None:
        """Tell the sampler how often each prompt was answered correctly."""
        for group in first_tries:
            correct = self._filter.unaided(group)
            if not np.isnan(correct).all():
                self._sampler.observe(group.group.prompt, float(np.nanmean(correct)))

    def _metrics(
        self,
        first_tries: Sequence[ScoredGroup],
        groups: Sequence[ScoredGroup],
        sampled: Sequence[ScoredGroup],
    ) -> dict[str, float]:
        """Return metrics of what was sampled, before any correction and filter.

        groups: those to train; sampled: those of this step, corrected."""
        seen = first_tries or groups
        metrics: dict[str, float] = {}
        metrics |= by_domain(rollout_metrics, seen)
        metrics |= by_domain(self._filter.metrics, seen)
        metrics |= self._sampler.metrics()
        metrics |= self._rewards.take_metrics()
        metrics |= self._dispatcher.take_metrics()
        metrics |= outcome_metrics(seen)
        if self._allocation is not None:
            metrics |= self._allocation.take_metrics()
        if self._seeding is not None:
            metrics |= self._seeding.finish_step(first_tries)
        if self._correction is not None:  # acceptance is that of the corrected groups
            metrics |= self._correction.take_metrics()
            corrected = by_domain(self._filter.metrics, sampled or groups)
            for name, value in corrected.items():
                if name.startswith("sampling/"):
                    metrics[name] = value
        return metrics


def _show_empty_step(step: int, num_sampled: int) -> None:
    show(
        "message",
        text=f"step {step}: none of {num_sampled} groups was kept: nothing is trained "
        "(group/all_correct_fraction and all_wrong_fraction tell why)",
    )


async def fill_batch(
    settings: SamplingConfig,
    *,
    target: int,
    acceptance: float,
    carried: Sequence[ScoredGroup],
    draw: Callable[[int, Collection[str] | None], Sequence[Prompt]],
    score: Callable[[Sequence[Prompt]], Awaitable[list[ScoredGroup]]],
    keeps: Callable[[ScoredGroup], bool],
) -> FilledBatch:
    """Sample until `target` groups are kept or rounds run out (DAPO, arXiv:2503.14476).

    A round draws missing / acceptance prompts, within `max_oversampling`; the expected `acceptance`
    is replaced by what this step observes. Without `settings.dynamic` there is one round.

    carried: kept groups of an earlier step; draw: takes a number of prompts and ids that must not
    be among them (None: any may); score: has prompts answered and scored; keeps: whether a group
    is trained."""
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
    return FilledBatch(kept, sampled, num_rounds)
