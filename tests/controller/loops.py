"""The real loop, store, sampler and metrics around an imagined trainer and engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from grpo_megatron.batching.spool import StoredShard, store_groups
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.evaluated_share import EvaluatedShare
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.display import Phases
from grpo_megatron.controller.resources import Resources
from grpo_megatron.controller.run import make_rl_loop
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import MetricsWriter, read_metrics
from grpo_megatron.trainer.requests import (
    FinishCheckpoint,
    RenewReference,
    SaveCheckpoint,
    Train,
    TrainReport,
)
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.controller.scored_groups import completion, prompt_of

_CALLS = itertools.count()  # of all loops: a resumed one has the directory of the first
START = RunState(0, 0, {}, 0.0, 0.0)
Answer = Callable[[int, Prompt, int], float]
"""(step, prompt, sample) -> value of the component `right`."""


def chance(step: int, prompt: Prompt, sample: int) -> float:
    """Prompt p7 is right with probability 7/32."""
    return float(derive_seed(step, prompt.prompt_id, sample) % 32 < int(prompt.prompt_id[1:]))


class Crash(Exception):
    """The controller dies."""


class Loop:
    """A run directory and what runs in it.

    Attributes:
        trained: Per `Train` request, (directory, rows) as the trainer sees them.
        states: State of every finished checkpoint by step.
    """

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        answer: Answer = chance,
        num_prompts: int = 32,
        crash_at: int | None = None,
    ):
        self.config, self.answer, self.crash_at = config, answer, crash_at
        self.run_dir = RunDir(root)
        self.run_dir.create()
        self.prompts = {
            d.name: [prompt_of(f"{d.name[0]}{i}", d.name) for i in range(num_prompts)]
            for d in config.domains
        }
        self.trained: list[tuple[str, SampleTable]] = []
        self.sampled: list[tuple[int, int]] = []  # (step, prompts)
        self.asked: list[tuple[int, int]] = []  # (step, weight version when it was asked for)
        self.dropped: list[int] = []  # steps that were asked for in vain
        self.publish_fails_at: int | None = None  # weight version
        self.exact: list[bool] = []  # by `Train` request
        self.renewed: list[int] = []  # steps without anything to train
        self.checked: list[int] = []  # weight versions for which prompts were sent
        self.written = lambda place, completion: completion  # by its place in what was asked
        self.num_engines = 1  # p8 is asked of the one after that of p7
        self.unchecked: set[int] = set()  # engines that joined
        self.is_training = False
        self.mismatch_at: int | None = None  # `Train` request
        self.states: dict[int, RunState] = {}
        self.unfinished: SaveCheckpoint | None = None
        self.writes_slowly = False  # a checkpoint is there when somebody waits for it
        self.calls: dict[StoredShard, tuple[int, dict[str, range]]] = {}
        """By the shard of its answers: step, and which samples of each prompt were asked for."""
        self.rollout_s = lambda step: 0.0
        self.rollout_may_end = lambda step, began_with: True  # began_with: weight version
        self.train_s = lambda step: 0.0
        self.training_may_end = lambda step: True
        self.steps_in_engines: list[int] = []
        self.most_steps_in_engines = 0

    def run(self, state: RunState = START) -> RunState:
        async def main() -> RunState:
            resources = Resources(
                tokenizer=SimpleNamespace(
                    decode=str,
                    decode_exactly=str,
                    stop_token_ids=(0,),
                    chat_template=None,
                    encode=lambda text, where=None: [ord(c) for c in text],
                ),
                splits=SimpleNamespace(train=self.prompts, validation=[], num_refused={}),
                trainer=self,
                dispatcher=self,
                rewards=SimpleNamespace(score=self.score, take_metrics=dict),
                publisher=self,
                teachers=ServedTeachers(self.config),
                judges=EngineControl([]),
            )
            self.version, self.resumed_at, self.holds_requests = state.step, 0.0, False
            self.weights_came = asyncio.Event()
            self.weights_came.set()
            writer = MetricsWriter(self.run_dir)
            writer.truncate_after(state.step - 1)
            with contextlib.closing(writer):
                loop = make_rl_loop(
                    self.config,
                    self.run_dir,
                    state,
                    resources,
                    evaluator=SimpleNamespace(greedy_accuracy=self.greedy_accuracy),
                    metrics=writer,
                    mirrors=SimpleNamespace(log=lambda record: None),
                    phases=Phases(),
                    stopping=asyncio.Event(),
                )
                self.sampler = loop.steps.sampler
                return await loop.run()

        return asyncio.run(main())

    def metrics(self) -> list[dict]:
        return [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(("time", "idle", "throughput", "canary/seconds"))
            }
            for record in read_metrics(self.run_dir.metrics)
        ]

    @property
    def engines(self) -> SimpleNamespace:
        return SimpleNamespace(alive=[SimpleNamespace(index=i) for i in range(self.num_engines)])

    async def rollouts(
        self,
        step: int,
        prompts,
        *,
        num_samples: int | None = None,
        max_tokens: int | None = None,
        samples=None,
    ) -> list[RolloutGroup]:
        self.sampled.append((step, len(prompts)))
        self.asked.append((step, self.version))
        began_with = self.version
        self.steps_in_engines.append(step)
        self.most_steps_in_engines = max(
            self.most_steps_in_engines, len(set(self.steps_in_engines))
        )
        try:
            await self.weights_came.wait()
            if not self.config.batch.max_staleness:
                began_with = self.version
            if self.rollout_s(step):
                await asyncio.sleep(self.rollout_s(step))
            while not self.rollout_may_end(step, began_with):
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.dropped.append(step)
            raise
        finally:
            self.steps_in_engines.remove(step)
        size = num_samples or self.config.batch.num_samples_per_prompt
        if samples is None:
            samples = [range(size)] * len(prompts)
        groups = [
            RolloutGroup(
                p,
                tuple(
                    self.written(
                        place,
                        self.completion(step, p, g, began_with),
                    )
                    for place, g in enumerate(numbers)
                ),
                sum(p.prompt_id.encode()) % self.num_engines,
            )
            for p, numbers in zip(prompts, samples, strict=True)
        ]
        found = store_groups(self.run_dir.root / "rollouts" / str(next(_CALLS)), groups)
        numbers = dict(zip([p.prompt_id for p in prompts], samples, strict=True))
        for group in found:
            for one in group.completions:
                self.calls[one.shard] = (step, numbers)
        return found

    def completion(self, step: int, prompt: Prompt, sample: int, began_with: int) -> Completion:
        """Its first token is of the weights with which it began, the others of those of now."""
        length = 1 + derive_seed(step, prompt.prompt_id, sample) % 5
        found = completion(length, self.version, sample == 3)
        if began_with == self.version:
            return found
        spans = [VersionSpan(began_with, 0, 1), VersionSpan(self.version, 1, length)]
        return replace(found, versions=tuple(span for span in spans if span.start < span.end))

    async def score(self, groups) -> list[ScoredGroup]:
        scored = []
        for group in groups:
            step, asked = self.calls[group.completions[0].shard]
            right = np.array(
                [
                    float(self.answer(step, group.prompt, g))
                    for g in asked.get(group.prompt.prompt_id, range(len(group.completions)))
                ]
            )
            scored.append(ScoredGroup(group, {"right": right, "short": 0 * right}, right))
        return scored

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def publish(self, version: int) -> None:
        await asyncio.sleep(0.01)  # what is asked for meanwhile waits
        if self.config.batch.max_staleness and self.config.publish.pause == "wait":
            assert not self.steps_in_engines
        if version == self.publish_fails_at:
            raise EngineError("no engine is alive")
        self.version, self.holds_requests = version, False
        self.weights_came.set()

    @contextlib.asynccontextmanager
    async def training(self):
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    async def ensure_version(self, version: int) -> None:
        assert self.version == version

    async def pause_engines(self) -> None:
        assert self.is_training  # else an engine may be joining
        self.holds_requests = True
        self.weights_came.clear()

    async def greedy_accuracy(self, prompts) -> EvaluatedShare:
        return EvaluatedShare(0.5, 8)

    async def check_logprobs(self, prompts) -> dict[str, float]:
        self.checked.append(self.version)
        self.unchecked.clear()
        return {"canary/seconds": 0.0}

    async def call(
        self, request: Train | SaveCheckpoint | FinishCheckpoint | RenewReference
    ) -> TrainReport | bool | None:
        if isinstance(request, RenewReference):
            self.renewed.append(request.after)
            return None
        if isinstance(request, SaveCheckpoint):
            assert self.unfinished is None
            self.unfinished = request
            if not request.beside:
                self.finish_checkpoint()
            return None
        if isinstance(request, FinishCheckpoint):
            if self.unfinished is not None:
                if self.writes_slowly and not request.wait:
                    return False
                self.finish_checkpoint()
            return True
        if len(self.trained) == self.crash_at:
            raise Crash
        if len(self.exact) == self.mismatch_at:
            raise MismatchError("engine and trainer disagree")
        self.exact.append(request.exact)
        table = SampleTable(request.directory)
        self.trained.append((request.directory.name, table))
        await asyncio.sleep(self.train_s(table.manifest.step))
        while not self.training_may_end(table.manifest.step):
            await asyncio.sleep(0.001)
        assert len(table)
        for row in range(len(table)):  # what the controller lists, and what the shard holds
            assert table.prompt_lengths[row] == len(table.prompt_ids(row))
            assert table.completion_lengths[row] == len(table.completion(row)[0])
        return TrainReport(
            metrics={"grad/norm": 1.0},
            updates=int(table.update.max()) + 1,
            tokens=int(table.completion_lengths.sum()),
            state={},
        )

    def finish_checkpoint(self) -> None:
        request = self.unfinished
        state = RunState(**json.loads(json.dumps(request.state)))
        self.states[state.step] = state
        request.directory.mkdir(parents=True, exist_ok=True)
        (request.directory / "complete.json").write_text("{}")
        self.unfinished = None
