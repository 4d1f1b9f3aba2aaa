"""The RL loop: rollout → reward → train → publish, strictly on-policy or one step ahead.

    max_staleness 0:  rollout k │ train k │ publish k+1 │ rollout k+1 │ …
    max_staleness 1:  rollout k+1 runs while step k trains; its samples are one version behind.

All that a step trains on is on disk before; what is in the store is never sampled again."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_megatron.batching.manifest import StepFacts, is_recorded, read_manifest
from grpo_megatron.checkpoints.retention import prune
from grpo_megatron.controller.alarms import Alarms
from grpo_megatron.controller.display import show
from grpo_megatron.controller.evaluation import greedy_accuracy
from grpo_megatron.controller.group_filter import by_domain, not_older, staleness
from grpo_megatron.controller.recorder import prune_store, record_step, starting_steps
from grpo_megatron.controller.rollout_batch import RolloutBatchBuilder
from grpo_megatron.controller.session import Session
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import MismatchError
from grpo_megatron.files import replace_directory
from grpo_megatron.rollout.segments import finish_or_cancel
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import Mirrors
from grpo_megatron.telemetry.samples import extremes, write_samples
from grpo_megatron.trainer.requests import SaveCheckpoint, Train, TrainReport


@dataclass
class RecordedStep:
    step: int
    directory: Path
    facts: StepFacts
    seconds: dict[str, float] = field(default_factory=dict)
    canary: dict[str, float] = field(default_factory=dict)
    fresh: bool = False  # sampled just now


class RLLoop:
    def __init__(self, session: Session, state: RunState, metrics: MetricsWriter, mirrors: Mirrors):
        self.session = session
        self.state = state
        self.metrics = metrics
        self.mirrors = mirrors
        self.config = session.config
        self.run_dir = session.run_dir
        self.ahead = self.config.batch.max_staleness > 0
        self.weights = {d.name: d.weight for d in self.config.domains}
        self.sampler = PromptSampler(
            session.splits.train, self.weights, self.config.seed, self.config.curriculum
        )
        if state.sampler:
            self.sampler.load_state_dict(state.sampler)
        self.source = RolloutBatchBuilder(session, self.sampler)
        self.alarms = Alarms(self.config.routing.load_alarm)
        self.started = time.monotonic() - state.seconds
        self.phase_seconds: Counter[str] = Counter()
        self.first = state.step
        self._checkpointed = -1
        self.asked: asyncio.Task[RecordedStep] | None = None  # the next step's samples
        self._canary_found: dict[str, float] = {}  # ahead: of the weights that sample

    async def run(self) -> RunState:
        """Returns the state after the last step; it is checkpointed."""
        try:
            self._canary_found = await self._canary() if self.ahead else {}
            while self.state.step < self.config.num_steps and not self.session.stopping.is_set():
                await self.take_step(more=self.state.step + 1 < self.config.num_steps)
        finally:
            if self.asked:
                self.asked.cancel()
                await asyncio.gather(self.asked, return_exceptions=True)
        await self.checkpoint()
        return self.state

    async def take_step(self, *, more: bool) -> None:
        """Step `state.step`. With `more`, the next one's samples are asked for as soon as may be:
        ahead, while this one trains; else of engines that rest until they have its weights."""
        step = self.state.step
        publisher = self.session.publisher
        if self.asked:
            self.session.phase.sampling()
        recorded = await self.collect(step, self.asked or self._sample(step))
        self.asked = asyncio.create_task(self._sample(step + 1)) if self.ahead and more else None
        report = await self.train(recorded)
        if self.asked and self.config.publish.pause == "wait":
            await asyncio.wait([self.asked])  # engines finish before their weights change
        if not self.config.uses_dataset:
            with self.session.phase("publish"):
                if more and self._engines_may_be_asked_early(step):
                    self.asked = asyncio.create_task(self._sample(step + 1))
                await publisher.publish(step + 1)
                if self.ahead:
                    self._canary_found = await self._canary()
        await self.finish(recorded, report)

    def _engines_may_be_asked_early(self, step: int) -> bool:
        """Whether requests of step + 1 may go out before its weights: engines keep them until
        then, and nothing else needs the engines first."""
        if not self.session.publisher.resting or self.session.stopping.is_set():
            return False
        if self.config.placement.shared_servers:  # asking would wake their judges too early
            return False
        return not _is_due(self.config.evaluation.interval, step)

    async def collect(self, step: int, sampling: Awaitable[RecordedStep]) -> RecordedStep:
        """The step's samples, from the store or from the engines, with its canary."""
        if self.ahead:  # the trainer is about to have other weights than the engines
            return replace(await sampling, canary=self._canary_found)
        if self.config.can_verify_from_samples:
            recorded = await sampling
            living = {replica.index for replica in self.session.publisher.engines.alive}
            if recorded.fresh and living <= set(recorded.facts.verified_replicas):
                return recorded
            return replace(recorded, canary=await self._canary())
        both: list[Any] = await finish_or_cancel([sampling, self._canary()])
        sampled: RecordedStep = both[0]
        return replace(sampled, canary=both[1])

    async def _canary(self) -> dict[str, float]:
        if not self.config.publish.canary or self.config.uses_dataset:
            return {}
        prompts = next(iter(self.session.splits.train.values()))
        return await self.session.publisher.check_canary(prompts[:8])

    async def _sample(self, step: int) -> RecordedStep:
        directory = self.run_dir.step_store(step)
        if is_recorded(directory):
            recorded = read_manifest(directory)
            self.sampler.load_state_dict(recorded.sampler)  # its draws depended on its answers
            return RecordedStep(step, directory, recorded)
        config = self.config
        publisher = self.session.publisher
        started = time.perf_counter()
        await self.session.judges.wake()
        version = publisher.version if self.ahead else step  # of the weights that sample
        sampled = await self.source.groups_of(step)
        groups = sampled.groups
        metrics = sampled.metrics
        rollout_s = sampled.rollout_s
        stale = version < step or len(not_older(groups, step)) < len(groups)
        advantages_need_dropped = config.objective.advantage_std == "batch_raw"
        facts = StepFacts(
            kind="rl",
            step=step,
            version=version,
            stale=stale,
            domains=list(self.weights),
            verified_replicas=sorted({g.group.replica for g in groups if not stale}),
            sampler=self.sampler.state_dict(),
            metrics=metrics | by_domain(lambda part: staleness(part, step), groups),
            extremes=extremes(step, groups, config.telemetry.samples_per_step),
            dropped_rewards=sampled.dropped_rewards if advantages_need_dropped else {},
        )
        scored_at = time.perf_counter()
        taught = await self.session.teachers.answers([scored.group for scored in groups])
        written_from = time.perf_counter()
        await asyncio.to_thread(
            record_step,
            directory,
            groups,
            config.batch.updates_per_rollout,
            facts,
            self.session.tokenizer.decode,
            recorded_shape(config),
            taught,
        )
        waited = 0.0 if self.ahead else max(0.0, publisher.resumed - started)  # for the weights
        seconds = {
            "rollout": rollout_s - waited + time.perf_counter() - written_from,
            "reward": scored_at - started - rollout_s,
        }
        if taught:
            seconds["teachers"] = written_from - scored_at
        return RecordedStep(step, directory, facts, seconds, fresh=True)

    async def train(self, recorded: RecordedStep) -> TrainReport:
        """Take the step's optimizer steps, while engines rest where they have nothing to do.

        Raises MismatchError where the samples show that an engine computes something else; the
        step is out of the store then."""
        if recorded.facts.is_skipped:
            return TrainReport(metrics={}, state=self.state.objective, updates=0, tokens=0)
        with self.session.phase("train"):
            config = self.config
            publisher = self.session.publisher
            directory = recorded.directory
            engines_rest = not (self.ahead or config.uses_dataset)
            if engines_rest and config.placement.mode == "colocated":
                await publisher.pause_engines()  # before the training, elsewhere beside it
            await self.session.judges.rest(sleep=config.placement.gpus_per_node > 0)
            request = Train(
                directory=directory,
                first_update=self.state.updates,
                num_updates=config.num_steps * config.batch.updates_per_rollout,
                state=self.state.objective,
                exact=recorded.fresh or recorded.step == self.first,
            )
            together: list[Awaitable[Any]] = [self.session.trainer.call(request)]
            if engines_rest:
                together.append(publisher.pause_engines())
            try:
                results = await finish_or_cancel(together)
            except MismatchError:  # nor may a resume train them
                replace_directory(directory, directory.with_name(f"rejected_{directory.name}"))
                raise
            report: TrainReport = results[0]
            return report

    async def finish(self, recorded: RecordedStep, report: TrainReport) -> None:
        """Count the step as done: its metrics, the state, maybe an evaluation and a checkpoint."""
        step = recorded.step
        facts = recorded.facts
        metrics = self._metrics(recorded, report)
        self.state = replace(
            self.state,
            step=step + 1,
            updates=self.state.updates + report.updates,
            sampler=facts.sampler,
            seconds=time.monotonic() - self.started,
            objective=report.state,
        )
        for alarm, text in self.alarms(metrics).items():
            metrics[f"alarm/{alarm}"] = float(bool(text))
            if text:
                show("message", text=f"step {step}: {text}")
        if _is_due(self.config.evaluation.interval, step):
            await self.session.publisher.ensure_version(step + 1)
            metrics["evaluation/accuracy"] = await greedy_accuracy(
                self.session, self.session.splits.validation
            )
        record = self.metrics.write(step, metrics)
        self.metrics.write_normalisers(report.normalisers)
        self.mirrors.log(record)
        write_samples(self.run_dir, step, facts.extremes)
        show("step", metrics=record, samples=facts.extremes)
        if _is_due(self.config.checkpoint.interval, step):
            await self.checkpoint()

    def _metrics(self, recorded: RecordedStep, report: TrainReport) -> dict[str, Any]:
        """What was sampled, trained and measured, and the seconds of its phases."""
        version = float(recorded.facts.version)
        metrics = {**recorded.facts.metrics, **recorded.canary, **report.metrics}
        metrics["policy/version"] = version
        metrics["policy/staleness"] = recorded.step - version

        seconds = recorded.seconds | self.session.phase.take_seconds()
        self.phase_seconds.update(seconds)
        for phase, passed in seconds.items():
            metrics[f"time/{phase}_s"] = passed
        metrics["time/old_logprobs_s"] = report.old_logprobs_s
        metrics["time/step_s"] = sum(seconds.values())
        tokens = {"rollout": metrics["batch/num_tokens"], "train": report.tokens}
        for phase, count in tokens.items():
            if seconds.get(phase):
                metrics[f"throughput/{phase}_tokens_per_s"] = count / seconds[phase]
        return metrics

    async def checkpoint(self) -> None:
        """Save the state after the last step, unless that was done."""
        if self._checkpointed == self.state.step:
            return
        with self.session.phase("checkpoint"):
            directory = self.run_dir.step_checkpoint(self.state.step)
            request = SaveCheckpoint(directory=directory, state=asdict(self.state))
            await self.session.trainer.call(request)
        self._checkpointed = self.state.step
        self.session.event("checkpoint", step=self.state.step)
        prune(self.run_dir.checkpoints, self.config.checkpoint.keep)
        starts = starting_steps(self.config, self.run_dir)
        prune_store(self.run_dir.store, starts, self.config.checkpoint.keep_steps)


def _is_due(every: int, step: int) -> bool:
    return every > 0 and (step + 1) % every == 0
