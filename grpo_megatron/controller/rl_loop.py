"""The RL loop: rollout → reward → train → publish, strictly on-policy or some steps ahead.

    max_staleness 0:  rollout k │ train k │ publish k+1 │ rollout k+1 │ …
    max_staleness 1:  rollout k+1 runs while step k trains; its samples are one version behind.
    max_staleness N:  rollouts run up to step k+N while step k trains; its tokens are of versions
                      k - N to k.

All that a step trains on is on disk before; what is in the store is never sampled again."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from grpo_megatron.checkpoints.retention import prune
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.alarms import alarms_of
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.evaluation import HeldOutEvaluator
from grpo_megatron.controller.publishing import LOGPROB_CHECK_SECONDS, Publisher
from grpo_megatron.controller.recorded_step import RecordedStep, StepSource
from grpo_megatron.controller.recorder import prune_store, starting_steps
from grpo_megatron.controller.sampling_chain import SamplingChain
from grpo_megatron.controller.staleness_watch import StalenessWatch, TrainedSeconds
from grpo_megatron.controller.trainer_link import RunState, TrainerLink
from grpo_megatron.data.prompts import Splits
from grpo_megatron.errors import EngineError, GrpoMegatronError, MismatchError
from grpo_megatron.files import replace_directory
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import Mirrors
from grpo_megatron.telemetry.samples import write_samples
from grpo_megatron.trainer.requests import (
    FinishCheckpoint,
    RenewReference,
    SaveCheckpoint,
    Train,
    TrainReport,
)
from grpo_megatron.types import Prompt

_NUM_CHECK_PROMPTS = 8


class RLLoop:
    """Takes steps from `state` on, until the recipe's last one or until `stopping` is set.

    Attributes:
        state: After the last step that was taken.
        steps: Where the samples of each step come from.
        ahead: Whether steps are sampled while one before them trains.
        chain: Steps that were asked for already.
        phase_seconds: Seconds by phase, over all steps of this attempt."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        state: RunState,
        *,
        steps: StepSource,
        splits: Splits,
        trainer: TrainerLink,
        publisher: Publisher,
        judges: EngineControl,
        evaluator: HeldOutEvaluator,
        metrics: MetricsWriter,
        mirrors: Mirrors,
        phases: Phases,
        stopping: asyncio.Event,
    ):
        self.config = config
        self.run_dir = run_dir
        self.state = state
        self.ahead = config.batch.max_staleness > 0
        self.chain = SamplingChain(steps, config.steps_sampled_at_once)
        self.phase_seconds: Counter[str] = Counter()
        self.steps = steps
        self._splits = splits
        self._trainer = trainer
        self._publisher = publisher
        self._judges = judges
        self._evaluator = evaluator
        self._writer = metrics
        self._mirrors = mirrors
        self._phases = phases
        self._stopping = stopping
        self._alarms = alarms_of(config, run_dir.metrics)
        self._started = time.monotonic() - state.seconds
        self._first = state.step
        self._staleness = StalenessWatch(config, state.bound)
        self._arrival_s = 0.0  # how long the newest weights came beside decoding
        self._pause_s = 0.0  # how long engines paused for them
        self._check_s = 0.0  # how long the log-prob check after that took
        self._published_at = 0.0  # when both were over; 0 before the first publish
        self._after_s = 0.0  # from then to the next step
        self._step_began = time.monotonic()
        self._checkpointed = -1  # number of steps in the newest checkpoint
        self._has_recorded_memory = False
        self._unfinished: int | None = None  # step whose checkpoint is being written
        self._logprob_check: dict[str, float] = {}
        """Metrics of the newest log-prob check, where rollouts run ahead."""

    async def run(self) -> RunState:
        """Take the steps; returns the state after the last one, which is checkpointed."""
        try:
            if self.ahead:
                self._logprob_check = await self._check_logprobs()
            while self.state.step < self.config.num_steps and not self._stopping.is_set():
                await self.take_step(more=self.state.step + 1 < self.config.num_steps)
        except (EngineError, MismatchError):
            with contextlib.suppress(GrpoMegatronError):  # the first error is the one to tell
                await self._finish_checkpoint(wait=True)
            raise
        finally:
            await self.chain.close()
        await self._checkpoint(beside=False)
        return self.state

    async def take_step(self, *, more: bool) -> None:
        """Take step `state.step`: collect its samples, train, publish, finish.

        more: another step follows. Its samples are asked for as early as possible: where rollouts
        run ahead, while this step trains; otherwise from engines that pause until they have the
        weights of this step."""
        step = self.state.step
        self._phases.subject = f"step {step}"
        if self._published_at:
            self._after_s = time.monotonic() - self._published_at
        if self.chain:
            self._phases.show_sampling()
        recorded = await self._collect(self.chain.take(step))
        if self.ahead and more:
            # engines have version `step` or, later, a newer one: no token is too old for its step
            last = min(step + self._staleness.bound, self.config.num_steps - 1)
            self.chain.ask(step + 1, last)
        report = await self._train(recorded)
        if self.ahead and self.config.publish.pause == "wait":
            # where no engine is alive, one may return only with the new weights
            await self.chain.drain(lambda: bool(self._publisher.engines.alive))
        if not self.config.uses_dataset:
            await self._publish(step, more=more)
        self.chain.resume()
        await self._finish(recorded, report)

    async def _collect(self, sampling: Awaitable[RecordedStep]) -> RecordedStep:
        """Wait for the step's samples and for the log-prob check of all engines that may have
        sampled them."""
        recorded = await self._collect_checked(sampling)
        if not self._publisher.unchecked:
            return recorded
        self._publisher.unchecked.clear()
        logprob_check = dict(recorded.logprob_check)
        for name, value in (await self._check_logprobs()).items():
            earlier = logprob_check.get(name, 0.0)
            if name == LOGPROB_CHECK_SECONDS:
                logprob_check[name] = earlier + value
            else:
                logprob_check[name] = max(earlier, value)
        return replace(recorded, logprob_check=logprob_check)

    async def _collect_checked(self, sampling: Awaitable[RecordedStep]) -> RecordedStep:
        """Wait for the step's samples, from the store or from the engines, and for the log-prob
        check of these engines, unless the samples themselves are one."""
        if self.ahead:  # the trainer is about to have other weights than the engines
            recorded = await sampling
            return replace(recorded, logprob_check=self._logprob_check)
        if self.config.can_verify_from_samples:
            recorded = await sampling
            if self._samples_check_engines(recorded):
                return recorded
            return replace(recorded, logprob_check=await self._check_logprobs())
        both: list[Any] = await finish_or_cancel([sampling, self._check_logprobs()])
        sampled: RecordedStep = both[0]
        return replace(sampled, logprob_check=both[1])

    def _samples_check_engines(self, recorded: RecordedStep) -> bool:
        """Whether training these samples checks the log-probs of every live engine: they were
        sampled just now, by all of these engines, and it is known which engine sampled which. Of
        one that joined meanwhile it is not: the one before it had the same number."""
        living = {replica.index for replica in self._publisher.engines.alive}
        engine_is_known = len(living) <= 1 or self.config.groups_stay_on_one_engine
        all_engines_sampled = living <= set(recorded.facts.verified_replicas)
        nobody_joined = not self._publisher.unchecked
        return recorded.fresh and engine_is_known and all_engines_sampled and nobody_joined

    async def _check_logprobs(self) -> dict[str, float]:
        """Have the engines answer prompts and the trainer compute their log-probs; returns metrics,
        empty where nothing is to be checked."""
        if not self.config.publish.canary or self.config.uses_dataset:
            return {}
        return await self._publisher.check_logprobs(self._check_prompts())

    def _check_prompts(self) -> list[Prompt]:
        """Return the prompts of a log-prob check: some of the first domain; where domains have
        adapters of their own, some of each."""
        of_domains = list(self._splits.train.values())
        if not self.config.adapter_domains:
            of_domains = of_domains[:1]
        share = -(-_NUM_CHECK_PROMPTS // len(of_domains))
        prompts: list[Prompt] = []
        for of_domain in of_domains:
            prompts += of_domain[:share]
        return prompts

    async def _train(self, recorded: RecordedStep) -> TrainReport:
        """Take the step's optimizer steps; engines that have nothing to do pause meanwhile.

        Raises MismatchError where the samples show that an engine computes something else; the
        step is out of the store then."""
        if recorded.facts.is_skipped:
            await self._trainer.call(RenewReference(after=recorded.step))
            return TrainReport(metrics={}, state=self.state.objective, updates=0, tokens=0)
        config = self.config
        directory = recorded.directory
        engines_pause = not (self.ahead or config.uses_dataset)
        with self._phases.measure("train"):
            request = Train(
                directory=directory,
                first_update=self.state.updates,
                num_updates=config.num_steps * config.batch.updates_per_step,
                state=self.state.objective,
                exact=recorded.fresh or recorded.step == self._first,
            )
            try:
                async with self._publisher.training():
                    # colocated engines leave their devices before, others pause meanwhile
                    if engines_pause and config.placement.mode == "colocated":
                        await self._publisher.pause_engines()
                    await self._judges.pause(sleep=config.placement.gpus_per_node > 0)
                    together: list[Awaitable[Any]] = [self._trainer.call(request)]
                    if engines_pause:
                        together.append(self._publisher.pause_engines())
                    results = await finish_or_cancel(together)
            except MismatchError:  # a resume may not train these samples either
                replace_directory(directory, directory.with_name(f"rejected_{directory.name}"))
                raise
        report: TrainReport = results[0]
        return report

    async def _publish(self, step: int, *, more: bool) -> None:
        """Bring the weights after `step` to the engines, which may get the next requests first."""
        with self._phases.measure("publish"):
            if more and self._engines_may_be_asked_early(step):
                self.chain.ask(step + 1, step + 1)
            began = time.monotonic()
            await self._publisher.publish(step + 1)
            resumed = time.monotonic()
            if self.ahead:
                self._logprob_check = await self._check_logprobs()
        self._published_at = time.monotonic()
        self._pause_s = resumed - began
        if self.config.publish.beside_decoding:
            self._pause_s = self._publisher.paused_s
        self._arrival_s = resumed - began - self._pause_s
        self._check_s = self._published_at - resumed

    def _engines_may_be_asked_early(self, step: int) -> bool:
        """Whether requests of step + 1 may go out before its weights: engines keep them until
        then, and nothing else needs the engines first."""
        if not self._publisher.holds_requests or self._stopping.is_set():
            return False
        if self.config.placement.shared_servers:  # asking would wake their judges too early
            return False
        return not _is_due(self.config.evaluation.interval, step)

    async def _finish(self, recorded: RecordedStep, report: TrainReport) -> None:
        """Count the step as done: its metrics, the state, maybe an evaluation and a checkpoint."""
        step = recorded.step
        facts = recorded.facts
        await self._finish_checkpoint(wait=False)
        self._record_memory(step, report)
        metrics = self._metrics(recorded, report)
        self.state = replace(
            self.state,
            step=step + 1,
            updates=self.state.updates + report.updates,
            sampler=facts.sampler,
            seconds=time.monotonic() - self._started,
            objective=report.state,
            bound=self._staleness.bound,
        )
        metrics |= self._alarm_metrics(step, metrics)
        if _is_due(self.config.evaluation.interval, step):
            metrics |= await self._evaluate(step)
        record = self._writer.write(step, metrics)
        self._writer.write_normalisers(report.normalisers)
        self._mirrors.log(record)
        write_samples(self.run_dir, step, facts.extremes)
        show("step", metrics=record, samples=facts.extremes)
        if _is_due(self.config.checkpoint.interval, step):
            await self._checkpoint(beside=self.config.checkpoint.beside_next_step)

    def _record_memory(self, step: int, report: TrainReport) -> None:
        """Write the trainer's memory to the events, once: after the first optimizer step, which
        makes Adam's moments."""
        has_moments = report.updates > 0
        if report.memory and has_moments and not self._has_recorded_memory:
            append_event(self.run_dir.events, "trainer_memory", step=step, bytes=report.memory)
            self._has_recorded_memory = True

    def _alarm_metrics(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Let the alarms see the step's metrics; show those that have gone off."""
        found = {}
        were_on = self._alarms.on
        for alarm, text in self._alarms(metrics).items():
            found[f"alarm/{alarm}"] = float(bool(text))
            if text and alarm not in were_on:
                show("message", text=f"step {step}: {text}")
        return found

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Return the greedy accuracy of the weights after `step`, left out where it is not known,
        and how many prompts could not be scored. Its time counts for no step."""
        began = time.monotonic()
        await self._publisher.ensure_version(step + 1)
        accuracy = await self._evaluator.greedy_accuracy(self._splits.validation)
        self._step_began += time.monotonic() - began
        if not accuracy.is_reliable:
            show("message", text=f"step {step}: validation accuracy {accuracy}")
        metrics = {"evaluation/unscorable": float(accuracy.num_unscorable)}
        if not math.isnan(accuracy.value):
            metrics["evaluation/accuracy"] = accuracy.value
        return metrics

    def _metrics(self, recorded: RecordedStep, report: TrainReport) -> dict[str, Any]:
        """Return what was sampled, trained and measured, and the seconds of the step's phases."""
        version = float(recorded.facts.version)
        metrics = {**recorded.facts.metrics, **recorded.logprob_check, **report.metrics}
        metrics["policy/version"] = version
        metrics["policy/staleness"] = recorded.step - version
        if self.config.publish.delta:
            metrics["publish/sent_fraction"] = self._publisher.sent_fraction
        metrics |= refused_rows(self._splits)

        seconds = recorded.seconds | self._phases.take_seconds()
        self.phase_seconds.update(seconds)
        for phase, passed in seconds.items():
            metrics[f"time/{phase}_s"] = passed
        if self.ahead:
            metrics["time/publish_pause_s"] = self._pause_s
        metrics["time/old_logprobs_s"] = report.old_logprobs_s
        metrics["time/step_s"] = sum(seconds.values())
        now = time.monotonic()
        metrics |= idle_shares(seconds, now - self._step_began, self.config.step_roles)
        of_trainer = TrainedSeconds(
            train_s=seconds.get("train", 0.0) + self._arrival_s,
            publish_s=self._pause_s,
            check_s=self._check_s,
            after_s=self._after_s,
        )
        metrics |= self._staleness.metrics(recorded.facts.metrics, recorded.sampling, of_trainer)
        self._step_began = now
        tokens = {"rollout": metrics["batch/num_tokens"], "train": report.tokens}
        for phase, count in tokens.items():
            if seconds.get(phase):
                metrics[f"throughput/{phase}_tokens_per_s"] = count / seconds[phase]
        return metrics

    async def _checkpoint(self, *, beside: bool) -> None:
        """Save the state after the last step, unless it is saved; with `beside`, its files are
        written while the next step runs."""
        if self._checkpointed != self.state.step:
            with self._phases.measure("checkpoint"):
                await self._finish_checkpoint(wait=True)
                directory = self.run_dir.step_checkpoint(self.state.step)
                state = asdict(self.state)
                await self._trainer.call(
                    SaveCheckpoint(directory=directory, state=state, beside=beside)
                )
            self._checkpointed = self.state.step
            self._unfinished = self.state.step
        if not beside:
            await self._finish_checkpoint(wait=True)

    async def _finish_checkpoint(self, *, wait: bool) -> None:
        """Record the checkpoint that was saved last as finished, and remove what it replaces. One
        that is still being written is left alone, unless `wait`."""
        if self._unfinished is None:
            return
        is_finished = await self._trainer.call(FinishCheckpoint(wait=wait))
        if not is_finished:
            return
        append_event(self.run_dir.events, "checkpoint", step=self._unfinished)
        self._unfinished = None
        prune(self.run_dir.checkpoints, self.config.checkpoint.keep)
        starts = starting_steps(self.config, self.run_dir)
        prune_store(
            self.run_dir.store,
            starts,
            self.config.checkpoint.keep_steps,
            present=self.state.step,
        )


def refused_rows(splits: Splits) -> dict[str, float]:
    """Count the rows that were left out because of an image, also by domain where there are
    several; empty for a model that reads text only. The same in every step of an attempt."""
    if not splits.num_refused:
        return {}
    name = "data/rows_refused_for_images"
    metrics = {name: float(sum(splits.num_refused.values()))}
    if len(splits.num_refused) > 1:
        for domain, count in splits.num_refused.items():
            metrics[f"{name}@{domain}"] = float(count)
    return metrics


_BUSY_PHASES = {
    "trainer": ("train", "publish", "checkpoint"),
    "engines": ("rollout",),
    "rewards": ("reward",),
}
"""Phases in which each of them has something to do."""


def idle_shares(
    seconds: Mapping[str, float], passed: float, roles: Sequence[str]
) -> dict[str, float]:
    """Return the share of the `passed` seconds of a step in which each of `roles` did nothing, of
    trainer, engines and rewards.

    seconds: of the step by phase. Sampling ahead counts where its step is trained, not where it
    ran, so that single steps are near the truth and means are the truth."""
    shares = {}
    for role in roles:
        busy = sum(seconds.get(phase, 0.0) for phase in _BUSY_PHASES[role])
        shares[f"idle/{role}"] = max(0.0, 1.0 - busy / passed)
    return shares


def _is_due(every: int, step: int) -> bool:
    return every > 0 and (step + 1) % every == 0
