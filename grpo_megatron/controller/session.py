"""Everything a stage works with: prompts, engines, trainer, rewards, metrics."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.display import show
from grpo_megatron.controller.phases import Phases
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.data.prompts import Splits, load_splits
from grpo_megatron.data.tiny_model import init_weights
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import EngineError, raised_as
from grpo_megatron.network import wait_for_endpoint
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.publish import WeightPublisher
from grpo_megatron.rollout.worker import RolloutWorker
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event


@dataclass
class Session:
    config: RunConfig
    run_dir: RunDir
    tokenizer: TextTokenizer
    splits: Splits
    trainer: TrainerLink
    worker: RolloutWorker
    rewards: RewardPool
    publisher: Publisher
    teachers: ServedTeachers
    judges: WeightPublisher  # those that rest while the trainer works
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    phase: Phases = field(default_factory=Phases)

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to the run's events."""
        append_event(self.run_dir.events, kind, **fields)


@contextlib.asynccontextmanager
async def open_session(config: RunConfig, run_dir: RunDir) -> AsyncIterator[Session]:
    """Wait for engines and trainer; close everything at the end."""
    async with contextlib.AsyncExitStack() as stack:
        trainer = TrainerLink(config.trainer.command_timeout_s)
        if config.model.path is None and not (run_dir.model / "model.safetensors").exists():
            init_weights(run_dir.model, config.seed)
        await trainer.listen(run_dir.endpoints / "controller.json")
        stack.push_async_callback(trainer.close)
        tokenizer = load_tokenizer(config.model.path or run_dir.model)
        splits = load_splits(config, tokenizer)
        rewards = await stack.enter_async_context(
            RewardPool(
                config.domains,
                num_workers=config.data.reward_workers,
                timeout_s=config.data.reward_timeout_s,
                concurrency=config.data.reward_concurrency,
                log_path=run_dir.logs / "rewards.log",
                budgets={d.name: config.max_new_tokens_of(d.name) for d in config.domains},
            )
        )
        teachers = ServedTeachers(config)
        stack.push_async_callback(teachers.close)
        with raised_as(
            EngineError,
            "a teacher does not answer",
            EngineError,
            where="distillation.teachers",
            remedy="is its server up?",
        ):
            await teachers.meet([domain[0] for domain in splits.train.values() if domain])
        judges = WeightPublisher(
            [
                await stack.enter_async_context(EngineClient(url))
                for url in config.placement.shared_servers
            ],
            asleep=config.placement.gpus_per_node > 0,
        )  # as they were left
        with raised_as(
            EngineError,
            "a judge cannot be woken",
            EngineError,
            where="placement.shared_servers",
            remedy="is it up? It needs VLLM_SERVER_DEV_MODE=1, and on GPUs --enable-sleep-mode",
        ):
            await judges.wake()
        show("phase", name="starting")
        clients = await _connect(config, run_dir, stack)
        engines = ReplicaPool(
            clients,
            max_attempts=config.rollout.max_attempts,
            on_death=lambda replica: _on_replica_death(run_dir, replica),
        )
        worker = RolloutWorker(
            config, engines, stop_token_ids=tokenizer.stop_token_ids, decode=tokenizer.decode
        )
        yield Session(
            config,
            run_dir,
            tokenizer,
            splits,
            trainer,
            worker,
            rewards,
            Publisher(config, run_dir, trainer, engines),
            teachers,
            judges,
        )


async def _connect(
    config: RunConfig, run_dir: RunDir, stack: contextlib.AsyncExitStack
) -> list[EngineClient | None]:
    """By replica, None for those that did not come up; they are named. EngineError: none did."""

    async def connect(name: str) -> EngineClient:
        def is_alive() -> bool:  # the supervisor knows
            return not (run_dir.endpoints / f"{name}.dead").exists()

        limit_s = config.rollout.startup_timeout_s
        found = await asyncio.to_thread(
            wait_for_endpoint, run_dir.endpoints / f"{name}.json", limit_s, is_alive, EngineError
        )
        client = EngineClient(
            f"http://{found.host}:{found.port}", name, config.rollout.request_timeout_s
        )
        await stack.enter_async_context(client)
        await client.wait_ready(limit_s, is_alive)
        return client

    names = [f"rollout-{i}" for i in range(config.rollout.num_replicas)]
    found = await asyncio.gather(*map(connect, names), return_exceptions=True)
    failed = [result for result in found if isinstance(result, BaseException)]
    for error in failed:
        if not isinstance(error, EngineError) or len(failed) == len(found):
            raise error
        show("message", text=f"going on without an engine: {error.message}")
    return [result if isinstance(result, EngineClient) else None for result in found]


def _on_replica_death(run_dir: RunDir, replica: Replica) -> None:
    name = replica.client.name
    cause = str(replica.cause_of_death)
    logging.getLogger(__name__).warning("%s is dead: %s", name, cause)
    show("message", text=f"{name} is dead; its requests go to the others")
    append_event(run_dir.events, "engine_dead", role=name, cause=cause)
