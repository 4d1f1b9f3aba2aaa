"""A short supervised start: the policy must be right sometimes before rewards can teach it.

It has checkpoints of its own, below `checkpoints/cold_start`, so that one that is longer than a
job's time limit goes on in the next job. They go when RL has its first."""

import shutil
import time
from dataclasses import asdict, dataclass
from typing import Any

from grpo_megatron.checkpoints.retention import prune
from grpo_megatron.config.run import ColdStartConfig
from grpo_megatron.controller.dataset import DatasetAnswers
from grpo_megatron.controller.display import show
from grpo_megatron.controller.evaluation import greedy_accuracy
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.controller.restoring import newest_whole
from grpo_megatron.controller.session import Session
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import TrainerError
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

    started: `time.monotonic()` when this attempt began."""

    def __init__(self, session: Session, settings: ColdStartConfig, started: float):
        self._session = session
        self._config = session.config
        self._settings = settings
        self._directory = session.run_dir.store / "cold_start"
        self._answers = DatasetAnswers(session.tokenizer, self._config.rollout.max_model_len)
        weights = {domain.name: domain.weight for domain in self._config.domains}
        self._sampler = PromptSampler(
            session.splits.train,
            weights,
            self._config.seed + 1,
            size_setting="cold_start.batch_size",
        )
        self._started = started
        self._steps = 0
        self._saved_steps = 0
        self._nll = float("nan")

    @property
    def seconds(self) -> float:
        """Wall time so far, over all attempts."""
        return time.monotonic() - self._started

    async def run(self) -> bool:
        """Train to the target; False: it was told to stop, and a resume goes on from its
        checkpoint.

        Raises TrainerError where `max_steps` do not suffice."""
        session = self._session
        await session.trainer.call(ResetOptimizer(cold_start=True))
        accuracy = 0.0
        if await self._restore():
            accuracy = await self._published_accuracy()
        while accuracy < self._settings.target_accuracy:
            if await self._stopped():
                return False
            self._require_steps_left(accuracy)
            await self._train(self._steps_until_evaluation(accuracy))
            if await self._stopped():
                return False
            if self._steps - self._saved_steps >= self._settings.checkpoint_interval:
                await self._save()  # before the evaluation, which a resume repeats
            accuracy = await self._published_accuracy()
            show(
                "message",
                text=f"cold start: step {self._steps}, nll {self._nll:.3f}, "
                f"validation accuracy {accuracy:.3f}",
            )
        await session.trainer.call(ResetOptimizer(cold_start=False))
        session.event("cold_start_done", steps=self._steps, accuracy=accuracy)
        session.phase.take_seconds()
        return True

    def forget(self) -> None:
        """Remove the checkpoints: those of RL have taken their place."""
        shutil.rmtree(self._session.run_dir.cold_start_checkpoints, ignore_errors=True)

    async def _stopped(self) -> bool:
        """Whether it was told to stop; what was done is saved then."""
        if not self._session.stopping.is_set():
            return False
        if self._steps > self._saved_steps:
            await self._save()
        return True

    def _require_steps_left(self, accuracy: float) -> None:
        if self._steps < self._settings.max_steps:
            return
        raise TrainerError(
            f"cold start reached accuracy {accuracy:.3f} after {self._steps} steps, the target is "
            f"{self._settings.target_accuracy}",
            where="cold_start.max_steps",
            remedy="raise max_steps or lower target_accuracy",
        )

    def _steps_until_evaluation(self, accuracy: float) -> int:
        """Accuracy climbs steeply in the end: look often, so that RL starts at about one height."""
        is_near = accuracy >= self._settings.target_accuracy / 4
        often = 10 if is_near else 1
        return max(self._settings.steps_per_evaluation // often, 1)

    async def _train(self, num_steps: int) -> None:
        session = self._session
        batches = [self._sampler.draw(self._settings.batch_size) for _ in range(num_steps)]
        samples = []
        for update, batch in enumerate(batches):
            for prompt in batch:
                samples.append((update, prompt, self._answers.completion(0, prompt.answer)))
        with session.phase("train"):
            if self._config.placement.mode == "colocated":
                await session.publisher.pause_engines()
            await session.judges.rest(sleep=self._config.placement.gpus_per_node > 0)
            record_completions(self._directory, samples)
            report = await session.trainer.call(
                TrainColdStart(directory=self._directory, first_update=self._steps)
            )
        self._steps += num_steps
        self._nll = report.metrics["loss/nll"]

    async def _published_accuracy(self) -> float:
        session = self._session
        with session.phase("publish"):
            await session.publisher.publish(0)
        with session.phase("rollout"):
            return await greedy_accuracy(session, session.splits.validation)

    async def _save(self) -> None:
        state = ColdStartState(self._steps, self._sampler.state_dict(), self.seconds)
        checkpoints = self._session.run_dir.cold_start_checkpoints
        directory = checkpoints / f"step_{self._steps:06d}"
        checkpoints.mkdir(exist_ok=True)
        request = SaveCheckpoint(directory=directory, state=asdict(state))
        with self._session.phase("checkpoint"):
            await self._session.trainer.call(request)
        self._session.event("cold_start_checkpoint", steps=self._steps)
        self._saved_steps = self._steps
        prune(checkpoints, self._config.checkpoint.keep)

    async def _restore(self) -> bool:
        session = self._session
        directory = await newest_whole(session, session.run_dir.cold_start_checkpoints)
        if directory is None:
            return False
        state = ColdStartState(**await session.trainer.call(LoadCheckpoint(directory)))
        self._steps = state.steps
        self._saved_steps = state.steps
        self._started -= state.seconds
        self._sampler.load_state_dict(state.sampler)
        show("message", text=f"resumed in the cold start, after step {state.steps}")
        session.event("cold_start_resumed", steps=state.steps)
        return True
