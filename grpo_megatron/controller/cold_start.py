"""A short supervised start: the policy must be right sometimes before rewards can teach it.

It has checkpoints of its own, below `checkpoints/cold_start`, so that one that is longer than a
job's time limit goes on in the next job. They go when RL has its first."""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.checkpoints.retention import prune
from grpo_megatron.config.evaluated_share import EvaluatedShare
from grpo_megatron.config.run import ColdStartConfig, RunConfig
from grpo_megatron.controller.demonstrations import Demonstrations, demonstrated
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.evaluation import HeldOutEvaluator
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.controller.restoring import newest_whole
from grpo_megatron.controller.run_clock import RunClock
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.data.prompts import Splits
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.errors import TrainerError
from grpo_megatron.files import remove_directory
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.trainer.requests import (
    LoadCheckpoint,
    ResetOptimizer,
    SaveCheckpoint,
    TrainColdStart,
)


@dataclass(frozen=True)
class ColdStartState:
    """Saved with every checkpoint of the cold start, in `complete.json`."""

    steps: int  # done
    sampler: dict[str, Any]  # from which the next step draws its prompts
    seconds: float  # wall time so far, over all attempts


class ColdStart:
    """Trains on prompt + answer until greedy validation accuracy reaches the target, within
    `cold_start.max_steps`. The weights are published as version 0.

    clock: of the run; stopping: set when the run is to stop."""

    def __init__(
        self,
        config: RunConfig,
        settings: ColdStartConfig,
        run_dir: RunDir,
        clock: RunClock,
        *,
        tokenizer: TextTokenizer,
        splits: Splits,
        trainer: TrainerLink,
        publisher: Publisher,
        judges: EngineControl,
        evaluator: HeldOutEvaluator,
        phases: Phases,
        stopping: asyncio.Event,
    ):
        self._config = config
        self._settings = settings
        self._run_dir = run_dir
        self._directory = run_dir.store / "cold_start"
        self._trainer = trainer
        self._publisher = publisher
        self._judges = judges
        self._evaluator = evaluator
        self._phases = phases
        self._stopping = stopping
        self._tokenizer = tokenizer
        self._validation = splits.validation
        self._sampler = PromptSampler(
            demonstrated(config, tokenizer, splits.train),
            {domain.name: domain.weight for domain in config.domains},
            config.seed + 1,
            size_setting="cold_start.batch_size",
        )
        self._clock = clock
        self._steps = 0
        self._saved_steps = 0
        self._nll = float("nan")

    async def run(self) -> bool:
        """Train to the target; False: it was told to stop, and a resume goes on from its
        checkpoint.

        Raises TrainerError where `max_steps` do not suffice, DataError where a demonstrated episode
        is no success."""
        log = self._run_dir.logs / "demonstrations.log"
        environments = EnvironmentHost(
            self._config.domains, log_path=log, endpoints=self._run_dir.endpoints
        )
        async with environments as host:
            model = self._config.model.path or self._run_dir.model
            demonstrations = Demonstrations(self._config, self._tokenizer, model, host.environment)
            return await self._run(demonstrations)

    async def _run(self, demonstrations: Demonstrations) -> bool:
        await self._trainer.call(ResetOptimizer(cold_start=True))
        accuracy = EvaluatedShare(0.0, len(self._validation))
        if await self._restore():
            accuracy = await self._published_accuracy()
        while not self._reaches_target(accuracy):
            if await self._stopped():
                return False
            self._require_steps_left(accuracy)
            await self._train(demonstrations, self._steps_until_evaluation(accuracy))
            if await self._stopped():
                return False
            if self._steps - self._saved_steps >= self._settings.checkpoint_interval:
                await self._save()  # before the evaluation, which a resume repeats
            accuracy = await self._published_accuracy()
            show(
                "message",
                text=f"cold start: step {self._steps}, nll {self._nll:.3f}, "
                f"validation accuracy {accuracy}",
            )
        await self._trainer.call(ResetOptimizer(cold_start=False))
        self._event("cold_start_done", steps=self._steps, accuracy=accuracy.value)
        self._phases.take_seconds()  # they are not those of the first RL step
        return True

    def forget(self) -> None:
        """Remove the checkpoints: those of RL have taken their place."""
        remove_directory(self._run_dir.cold_start_checkpoints)

    async def _stopped(self) -> bool:
        """Whether it was told to stop; what was done is saved then."""
        if not self._stopping.is_set():
            return False
        if self._steps > self._saved_steps:
            await self._save()
        return True

    def _reaches_target(self, accuracy: EvaluatedShare) -> bool:
        """Whether enough prompts could be scored, and enough of them are right; NaN is no target
        reached."""
        return accuracy.is_reliable and accuracy.value >= self._settings.target_accuracy

    def _require_steps_left(self, accuracy: EvaluatedShare) -> None:
        if self._steps < self._settings.max_steps:
            return
        raise TrainerError(
            f"the accuracy after {self._steps} steps of the cold start is {accuracy}; the target "
            f"is {self._settings.target_accuracy}",
            where="cold_start.max_steps",
            remedy="raise max_steps or lower target_accuracy",
        )

    def _steps_until_evaluation(self, accuracy: EvaluatedShare) -> int:
        """Return how many steps there are until the next evaluation. Accuracy climbs steeply in the
        end: look often, so that RL starts at about one height."""
        is_near = accuracy.value >= self._settings.target_accuracy / 4
        interval = self._settings.steps_per_evaluation
        if is_near:
            interval //= 10
        return max(interval, 1)

    async def _train(self, demonstrations: Demonstrations, num_steps: int) -> None:
        samples = []
        for update in range(num_steps):
            prompts = self._sampler.draw(self._settings.batch_size)
            playing = [demonstrations.completion(prompt) for prompt in prompts]
            completions = await finish_or_cancel(playing)
            for prompt, completion in zip(prompts, completions, strict=True):
                samples.append((update, prompt, completion))
        with self._phases.measure("train"):
            images = ImageFolder(self._run_dir.images)
            record_completions(self._directory, samples, images=images)
            async with self._publisher.training():
                if self._config.placement.mode == "colocated":
                    await self._publisher.pause_engines()
                await self._judges.pause(sleep=self._config.placement.gpus_per_node > 0)
                report = await self._trainer.call(
                    TrainColdStart(directory=self._directory, first_update=self._steps)
                )
        self._steps += num_steps
        self._nll = report.metrics["loss/nll"]

    async def _published_accuracy(self) -> EvaluatedShare:
        with self._phases.measure("publish"):
            await self._publisher.publish(0)
        with self._phases.measure("rollout"):
            return await self._evaluator.greedy_accuracy(self._validation)

    async def _save(self) -> None:
        state = ColdStartState(self._steps, self._sampler.state_dict(), self._clock.seconds)
        checkpoints = self._run_dir.cold_start_checkpoints
        directory = checkpoints / f"step_{self._steps:06d}"
        checkpoints.mkdir(exist_ok=True)
        request = SaveCheckpoint(directory=directory, state=asdict(state))
        with self._phases.measure("checkpoint"):
            await self._trainer.call(request)
        self._event("cold_start_checkpoint", steps=self._steps)
        self._saved_steps = self._steps
        prune(checkpoints, self._config.checkpoint.keep)

    async def _restore(self) -> bool:
        checkpoints = self._run_dir.cold_start_checkpoints
        directory = await newest_whole(self._trainer, checkpoints, self._run_dir.events)
        if directory is None:
            return False
        async with self._publisher.training():
            saved = await self._trainer.call(LoadCheckpoint(directory))
        state = ColdStartState(**saved)
        self._steps = state.steps
        self._saved_steps = state.steps
        self._clock.count_earlier(state.seconds)
        self._sampler.load_state_dict(state.sampler)
        show("message", text=f"resumed in the cold start, after step {state.steps}")
        self._event("cold_start_resumed", steps=state.steps)
        return True

    def _event(self, kind: str, **fields: Any) -> None:
        append_event(self._run_dir.events, kind, **fields)
