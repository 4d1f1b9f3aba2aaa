"""A new weight version, from the trainer into every live engine; canaries."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.publish import WeightPublisher
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.requests import (
    CompareLogprobs,
    ExportModel,
    JoinTransfer,
    OpenTransfer,
    SendWeights,
)
from grpo_megatron.types import Completion, Prompt
from grpo_megatron.weights.transfer_plan import TransferPlan

CANARY_TOKENS = 16


class Publisher:
    def __init__(
        self, config: RunConfig, run_dir: RunDir, trainer: TrainerLink, engines: ReplicaPool
    ):
        self.config = config
        self.run_dir = run_dir
        self.trainer = trainer
        self.engines = engines
        self.version, self.resumed, self._seconds = -1, 0.0, 0.0  # when it came, how long it took
        self._publisher = WeightPublisher([])
        self._plan: TransferPlan | None = None

    async def publish(self, version: int) -> None:
        """Bring `version` into all live engines; raises an EngineError when none is left."""
        started = time.perf_counter()
        await self._retry_on_live_replicas(lambda clients: self._publish(clients, version))
        self.version = version
        self.resumed = time.perf_counter()
        self._seconds = self.resumed - started

    @property
    def resting(self) -> bool:
        """Whether engines keep requests that come now until the next weights have come, soon."""
        return (
            self._publisher.paused
            and not self._publisher.asleep
            and self._seconds < 0.1 * self.config.rollout.request_timeout_s
        )

    async def ensure_version(self, version: int) -> None:
        """Publish `version` unless the engines have it."""
        if self.version != version:
            await self.publish(version)

    async def pause_engines(self) -> None:
        """Engines pause until the next publish; colocated, the trainer gets their devices."""
        placement = self.config.placement

        async def rest(clients: Sequence[EngineClient]) -> None:
            await self._connect(clients)
            await self._publisher.rest(
                sleep=placement.mode == "colocated" and placement.gpus_per_node > 0
            )

        await self._retry_on_live_replicas(rest)

    async def _retry_on_live_replicas(
        self, work: Callable[[list[EngineClient]], Awaitable[None]]
    ) -> None:
        while True:
            before = self.engines.alive
            try:
                return await work([replica.client for replica in before])
            except EngineError as error:
                await self._mark_dead(error, before)

    async def _publish(self, clients: Sequence[EngineClient], version: int) -> None:
        await self._connect(clients)
        if self._plan is None:
            directory = self.run_dir.root / "publish"
            await self.trainer.call(ExportModel(directory))
            await self._publisher.publish_file(version, str(directory.absolute()))
        else:
            await self._publisher.publish(
                version, self._plan, lambda: self.trainer.call(SendWeights(version=version))
            )

    async def _connect(self, clients: Sequence[EngineClient]) -> None:
        if clients == self._publisher.clients:
            return
        publisher = WeightPublisher(
            clients, pause_mode=self.config.publish.pause, asleep=self._publisher.asleep
        )
        if self.config.publish.method == "gloo":
            workers = await publisher.num_workers()
            opened = await self.trainer.call(OpenTransfer(num_workers=workers))
            self._plan = opened.plan
            await publisher.prepare(opened.senders, lambda: self.trainer.call(JoinTransfer()))
        self._publisher = publisher

    async def _mark_dead(self, error: EngineError, before: Sequence[Replica]) -> None:
        """Go on with the engines that still answer; without a dead one, the error stands."""
        for replica in before:
            await self.engines.examine(replica, error)
        if len(self.engines.alive) in (0, len(before)):
            raise error

    async def check_canary(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Every live engine answers `prompts`; the trainer computes the same."""
        started = time.perf_counter()
        worst = {"canary/abs_max": 0.0, "canary/abs_mean": 0.0}
        for replica in self.engines.alive:
            try:
                completions = await asyncio.gather(
                    *(self._sample(replica.client, p) for p in prompts)
                )
            except EngineError as error:
                if replica.is_alive:  # else the rollouts found out first
                    await self._mark_dead(error, self.engines.alive)
                continue
            directory = self.run_dir.root / "canary"
            record_completions(
                directory,
                [(0, p, c) for p, c in zip(prompts, completions, strict=True)],
                replica.client.name,
            )
            found = await self.trainer.call(CompareLogprobs(directory))
            if found.problem:
                raise MismatchError(
                    f"weight version {self.version}: {found.problem}",
                    where="publish.canary_tolerance",
                    remedy=found.remedy,
                )
            worst = {name: max(worst[name], found.metrics[name]) for name in worst}
        return {**worst, "canary/seconds": time.perf_counter() - started}

    async def _sample(self, client: EngineClient, prompt: Prompt) -> Completion:
        rollout = self.config.rollout
        tokens = min(CANARY_TOKENS, self.config.max_new_tokens_of(prompt.domain))
        seed = derive_seed(self.config.seed, "canary", self.version, prompt.prompt_id)
        return (
            await client.generate(
                prompt.token_ids,
                max_tokens=tokens,
                temperature=rollout.temperature,
                seed=seed if rollout.deterministic else None,
            )
        )[0]
