"""One run from start to end: cold start, RL, held-out accuracy before and after, export.

Every part gets here what it works with, by name, from the open resources."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from grpo_megatron.config.evaluated_share import EvaluatedShare, share_of
from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.config.gates import closed_gates
from grpo_megatron.config.history import record_settings
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import ColdStartConfig, RunConfig
from grpo_megatron.controller.cold_start import ColdStart
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.evaluation import Evaluator, HeldOutEvaluator, Results
from grpo_megatron.controller.exemplars import ExemplarStore
from grpo_megatron.controller.experience.asking import writer_of
from grpo_megatron.controller.experience.learner import ExperienceLearner, PromptTeller
from grpo_megatron.controller.experience.library import Library
from grpo_megatron.controller.experience.writer import LessonWriter
from grpo_megatron.controller.preference_steps import (
    AnswerScorer,
    PreferenceEvaluator,
    PreferenceRecorder,
    PreferenceSteps,
    ReferenceScores,
    Scores,
    answer_ends,
    drawn_preferences,
)
from grpo_megatron.controller.recorded_step import StepSource
from grpo_megatron.controller.recorder import drop_disconnected, prune_images
from grpo_megatron.controller.rejection import sample_dataset
from grpo_megatron.controller.resources import Resources, open_resources
from grpo_megatron.controller.restoring import newest_whole
from grpo_megatron.controller.rl_loop import RLLoop
from grpo_megatron.controller.rollout_batch import (
    RolloutBatchBuilder,
    StepSampler,
    load_sampling,
)
from grpo_megatron.controller.run_clock import RunClock, seconds_at_end
from grpo_megatron.controller.step_evaluation import StepEvaluator
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.data.preferences import Preferences
from grpo_megatron.data.prompts import Splits
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import GateError
from grpo_megatron.files import write_atomically
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import SETTINGS_TAKEN, append_event
from grpo_megatron.telemetry.made_with import record_code
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import Mirrors, make_mirrors
from grpo_megatron.trainer.requests import (
    ExportModel,
    LoadCheckpoint,
    SaveCheckpoint,
    SnapshotReference,
)
from grpo_megatron.types import Prompt


async def run(config: RunConfig, run_dir: RunDir, on_start: Callable) -> bool:
    """Run to the end; False: it was told to stop and can be resumed. `on_start` gets the event
    that stops cold start and RL, once they listen to it.

    Raises GateError where the results miss a gate, and what its parts raise."""
    started = time.monotonic()
    async with open_resources(config, run_dir) as resources:
        return await Run(config, run_dir, resources, on_start, started).run()


class Run:
    """One attempt of a run, with everything open that it needs.

    started: `time.monotonic()` when the attempt began."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        resources: Resources,
        on_start: Callable,
        started: float,
    ):
        self.config = config
        self.run_dir = run_dir
        self.resources = resources
        self.on_start = on_start
        self.clock = RunClock(started, seconds_at_end(run_dir))
        self.phases = Phases()
        self.stopping = asyncio.Event()
        self.reference: Scores = {}
        """Of preferences, where they are trained and the loss has a reference."""
        self.evaluator: HeldOutEvaluator = Evaluator(
            config,
            dispatcher=resources.dispatcher,
            rewards=resources.rewards,
            judges=resources.judges,
        )

    async def run(self) -> bool:
        """Run to the end (see the function `run`)."""
        _show_unused_setting(self.config)
        if self.resources.preferences is not None:
            await self._prepare_preferences(self.resources.preferences)
        state = await self._restore()
        record_code(self.run_dir.events)
        if state is None:
            state = await self._begin()
        if state is None:
            self._show_stopped("in the cold start")
            return False
        if not self.config.trains:
            append_event(self.run_dir.events, SETTINGS_TAKEN, step=state.step)
        else:
            state = await self._train(state)
            if state.step < self.config.num_steps:
                self._show_stopped(f"after {state.step} steps")
                return False
            await self._export()
        await self.resources.publisher.ensure_version(state.step)
        num_samples = {}
        if self.config.kind == "rejection_sample":
            num_samples = await self._sample_dataset()
        heldout: Sequence[Prompt] = self.resources.splits.heldout
        if self.config.experience is not None:
            learned = await self._learn_lessons(self.config.experience, state)
            if learned is None:
                return False
            state, heldout = learned
        results = await self.evaluator.evaluate(heldout, self.config.evaluation.num_samples)
        prune_images(self.run_dir.images, self.run_dir.store)
        self._conclude(state, results, num_samples, self.clock.seconds)
        return True

    # --- before the first step

    async def _prepare_preferences(self, preferences: Preferences) -> None:
        """Have the reference score the preferences, while the trainer has the first weights."""
        config = self.config
        trainer = self.resources.trainer
        if config.kind == "reward_model":
            _show_classless_family(config)
        recorder = PreferenceRecorder(
            config, self.run_dir.rollouts / "scored", self.resources.tokenizer
        )
        scorer = AnswerScorer(recorder, trainer, self.run_dir.rollouts / "scored" / "step")
        if config.preferences.has_reference:
            wanted = drawn_preferences(config, preferences, new_sampler(config, preferences.splits))
            reference = ReferenceScores(config, self.run_dir, scorer, trainer)
            self.reference = await reference.load(wanted)
        if config.preferences.rows == "steps":
            self.evaluator = StepEvaluator(preferences, scorer)
        else:
            self.evaluator = PreferenceEvaluator(config, preferences, self.reference, scorer)

    async def _restore(self) -> RunState | None:
        """Go on after the newest checkpoint that is whole; None without any."""
        trainer = self.resources.trainer
        directory = await newest_whole(trainer, self.run_dir.checkpoints, self.run_dir.events)
        if directory is None:
            return None
        saved = await trainer.call(LoadCheckpoint(directory))
        state = RunState(**saved)
        self.clock.count_earlier(state.seconds)
        drop_disconnected(self.run_dir.store, state.step)
        await self.resources.publisher.publish(state.step)
        show("message", text=f"resumed after step {state.step}")
        append_event(self.run_dir.events, "resumed", step=state.step)
        return state

    async def _begin(self) -> RunState | None:
        """Prepare step 0; None: told to stop in the cold start."""
        resources = self.resources
        drop_disconnected(self.run_dir.store, 0)
        cold_start = None
        if self.config.cold_start is not None:
            cold_start = self._make_cold_start(self.config.cold_start)
            self.on_start(self.stopping)
        await resources.publisher.publish(0)
        if cold_start is not None:
            has_ended = await cold_start.run()
            if not has_ended:
                return None
        await resources.trainer.call(SnapshotReference())
        before = EvaluatedShare(math.nan, 0)
        if self.config.takes_steps:
            before = await self._accuracy_before()
        state = RunState(
            0,
            0,
            {},
            before.value,
            self.clock.seconds,
            heldout_before_unscorable=before.num_unscorable,
        )
        if cold_start is None:
            return state
        directory = self.run_dir.step_checkpoint(0)  # not to be repeated by a resume
        await resources.trainer.call(SaveCheckpoint(directory=directory, state=asdict(state)))
        cold_start.forget()
        return state

    def _make_cold_start(self, settings: ColdStartConfig) -> ColdStart:
        resources = self.resources
        return ColdStart(
            self.config,
            settings,
            self.run_dir,
            self.clock,
            tokenizer=resources.tokenizer,
            splits=resources.splits,
            trainer=resources.trainer,
            publisher=resources.publisher,
            judges=resources.judges,
            evaluator=self.evaluator,
            phases=self.phases,
            stopping=self.stopping,
        )

    async def _accuracy_before(self) -> EvaluatedShare:
        prompts = self.resources.splits.heldout
        if not prompts:
            return EvaluatedShare(math.nan, 0)
        show("message", text=f"answering {len(prompts)} held-out prompts, before training")
        accuracy = await self.evaluator.greedy_accuracy(prompts)
        show("message", text=f"held-out accuracy before training {accuracy}")
        return accuracy

    # --- training

    async def _train(self, state: RunState) -> RunState:
        """Take the steps that are left; returns the state after the last one."""
        config = self.config
        num_earlier = state.step
        with self._telemetry() as (metrics, mirrors):
            metrics.truncate_after(state.step - 1)
            loop = make_rl_loop(
                config,
                self.run_dir,
                replace(state, seconds=self.clock.seconds),
                self.resources,
                reference=self.reference,
                evaluator=self.evaluator,
                metrics=metrics,
                mirrors=mirrors,
                phases=self.phases,
                stopping=self.stopping,
            )
            record_settings(self.run_dir, state.step)
            append_event(self.run_dir.events, SETTINGS_TAKEN, step=state.step)
            if state.step < config.num_steps:
                self.run_dir.outdate_result()
            self.on_start(self.stopping)
            state = await loop.run()
        totals = loop.phase_seconds.most_common()
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in totals)
        num_steps = state.step - num_earlier
        show("message", text=f"seconds by phase of {num_steps} steps: {spent}")
        return state

    @contextlib.contextmanager
    def _telemetry(self) -> Iterator[tuple[MetricsWriter, Mirrors]]:
        """Open the writer of metrics.jsonl and what copies it."""
        config = self.config
        with closing(MetricsWriter(self.run_dir)) as metrics:
            recipe = config.model_dump(mode="json")
            mirrors = make_mirrors(config.telemetry, self.run_dir, config.name, recipe)
            with closing(mirrors):
                yield metrics, mirrors

    async def _export(self) -> None:
        resources = self.resources
        ends = []
        if self.config.kind == "reward_model" and resources.preferences is not None:
            ends = answer_ends(resources.preferences, resources.tokenizer)
        num_bytes = await resources.trainer.call(ExportModel(self.run_dir.export, ends))
        show(
            "message",
            text=f"exported {num_bytes / 1e9:.3f} GB, read back whole: {self.run_dir.export}",
        )

    # --- after it

    async def _sample_dataset(self) -> dict[str, float]:
        return await sample_dataset(
            self.config,
            self.run_dir,
            splits=self.resources.splits,
            dispatcher=self.resources.dispatcher,
            rewards=self.resources.rewards,
            tokenizer=self.resources.tokenizer,
        )

    async def _learn_lessons(
        self, settings: ExperienceConfig, state: RunState
    ) -> tuple[RunState, list[Prompt]] | None:
        """Take the steps of a run of kind experience; returns the state after them and the held-out
        prompts with what was learned, None where it was told to stop."""
        library = Library(
            settings.max_experiences, settings.max_words, tokenizer=self.resources.tokenizer
        )
        if settings.path is not None:
            library.load(settings.path)
        teller = PromptTeller(
            self.config, settings, library=library, tokenizer=self.resources.tokenizer
        )
        if self.config.kind == "experience":
            step = await self._take_lesson_steps(settings, teller)
            if step < self.config.num_steps:
                self._show_stopped(f"after {step} steps")
                return None
            state = replace(state, step=step)
            show("message", text=f"{len(library.lessons)} lessons: {self.run_dir.experience}")
        return state, [teller.with_lessons(prompt) for prompt in self.resources.splits.heldout]

    async def _take_lesson_steps(self, settings: ExperienceConfig, teller: PromptTeller) -> int:
        """Take the steps; returns how many were taken, over all attempts."""
        resources = self.resources
        ask = writer_of(
            self.config, settings, dispatcher=resources.dispatcher, tokenizer=resources.tokenizer
        )
        learner = ExperienceLearner(
            self.config,
            self.run_dir,
            sampler=new_sampler(self.config, resources.splits),
            dispatcher=resources.dispatcher,
            rewards=resources.rewards,
            teller=teller,
            writer=LessonWriter(settings, ask),
            phases=self.phases,
            stopping=self.stopping,
        )
        learner.restore()
        if learner.step < self.config.num_steps:
            self.run_dir.outdate_result()
        self.on_start(self.stopping)
        with self._telemetry() as (metrics, mirrors):
            await learner.run(metrics, mirrors)
        return learner.step

    def _conclude(
        self,
        state: RunState,
        evaluation: Results,
        num_samples: dict[str, float],
        seconds: float,
    ) -> None:
        """Write `result.json` and show the result. Raises GateError where it misses a gate.

        num_samples: of the data set that the run made, empty where it made none."""
        before = None
        if self.config.takes_steps and not math.isnan(state.heldout_before):
            before = state.heldout_before
        result = {
            "eval": evaluation,
            "dataset": num_samples,
            "seconds": seconds,
            "before": before,
            "before_unscorable": state.heldout_before_unscorable,
            "steps": state.step,
            "accelerator_hours": self.config.num_devices * seconds / 3600,
        }
        write_atomically(self.run_dir.result, json.dumps(result, indent=1))
        self._check_gates(result)
        after = share_of(evaluation["all"], "accuracy")
        append_event(
            self.run_dir.events,
            "finished",
            before=before,
            after=evaluation["all"].get("accuracy"),
            seconds=seconds,
        )
        show("result", text=f"{_told_accuracy(before, after)} in {seconds:.0f} s")

    def _check_gates(self, result: dict[str, Any]) -> None:
        closed = closed_gates(self.config.gates, result)
        if closed:
            remedy = f"lower the gate; all figures are in {self.run_dir.result}"
            if self.config.trains:
                remedy = f"train more, or lower the gate; the weights are in {self.run_dir.export}"
            raise GateError("; ".join(closed), where="gates", remedy=remedy)

    def _show_stopped(self, when: str) -> None:
        show("message", text=f"stopped {when}; {self.run_dir.command('resume')}")


def _told_accuracy(before: float | None, after: EvaluatedShare) -> str:
    """What the last line of a run says of its accuracy; None: not measured."""
    told = "unknown"
    if not math.isnan(after.value):
        told = f"{after.value:.2f}"
    elif not after.num_prompts:
        return "nothing was held out; finished"
    if after.num_unscorable:
        told += f" ({after.unscorable_words})"
    if before is None:
        return f"held-out accuracy {told}"
    return f"held-out accuracy before {before:.2f} after {told}"


def make_rl_loop(
    config: RunConfig,
    run_dir: RunDir,
    state: RunState,
    resources: Resources,
    *,
    evaluator: HeldOutEvaluator,
    metrics: MetricsWriter,
    mirrors: Mirrors,
    phases: Phases,
    stopping: asyncio.Event,
    reference: Scores | None = None,
) -> RLLoop:
    """Put the RL loop together, with the prompts that `state` draws next.

    reference: scores of preferences, where they are trained and the loss has one."""
    sampler = new_sampler(config, resources.splits)
    exemplars = None
    if config.seeding is not None:
        exemplars = ExemplarStore(config.seeding.store_size)
    if state.sampler:
        load_sampling(state.sampler, sampler, exemplars)
    steps: StepSource
    if resources.preferences is not None:
        steps = PreferenceSteps(
            config,
            run_dir,
            sampler=sampler,
            preferences=resources.preferences,
            reference=reference or {},
            recorder=PreferenceRecorder(config, run_dir.rollouts / "drawn", resources.tokenizer),
        )
    else:
        steps = _make_step_sampler(config, run_dir, resources, sampler, exemplars, phases)
    return RLLoop(
        config,
        run_dir,
        state,
        steps=steps,
        splits=resources.splits,
        trainer=resources.trainer,
        publisher=resources.publisher,
        judges=resources.judges,
        evaluator=evaluator,
        metrics=metrics,
        mirrors=mirrors,
        phases=phases,
        stopping=stopping,
    )


def _make_step_sampler(
    config: RunConfig,
    run_dir: RunDir,
    resources: Resources,
    sampler: PromptSampler,
    exemplars: ExemplarStore | None,
    phases: Phases,
) -> StepSampler:
    batches = RolloutBatchBuilder(
        config,
        spool=run_dir.rollouts,
        sampler=sampler,
        exemplars=exemplars,
        dispatcher=resources.dispatcher,
        rewards=resources.rewards,
        tokenizer=resources.tokenizer,
        phases=phases,
    )
    return StepSampler(
        config,
        run_dir,
        sampler=sampler,
        exemplars=exemplars,
        batches=batches,
        publisher=resources.publisher,
        judges=resources.judges,
        teachers=resources.teachers,
        tokenizer=resources.tokenizer,
    )


def new_sampler(config: RunConfig, splits: Splits) -> PromptSampler:
    """Make a sampler of the training prompts that has drawn nothing."""
    return PromptSampler(
        splits.train,
        {domain.name: domain.weight for domain in config.domains},
        config.seed,
        config.curriculum,
    )


def _show_classless_family(config: RunConfig) -> None:
    """Say of a reward model that transformers will not load it, where that is so."""
    hf, _ = configuration_of(config.model)
    family = family_of(hf["model_type"])
    if not family.classifies:
        show(
            "message",
            text=f"transformers has no {family.architecture_of_scalars} for models of "
            f"{family.name}: it cannot load the export, which is for vLLM",
        )


def _show_unused_setting(config: RunConfig) -> None:
    """Say which setting of an older recipe decides nothing any more."""
    default = ObjectiveConfig.model_fields["correct_threshold"].default
    if config.objective.correct_threshold != default:
        show(
            "message",
            text="objective.correct_threshold is not used in training: the component "
            "domains.*.accuracy and its accuracy_threshold say what is correct",
        )
