"""What a run holds open: trainer, engines, judges, teachers, reward processes. Opened and closed
here, handed out to the parts that need them in `run.py`."""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.connecting import connect_engine, connect_worker, is_expected
from grpo_megatron.controller.display import show, show_phase
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.recorded_pairs import recorded_answers
from grpo_megatron.controller.rejoining import Rejoining
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.data.preferences import Preferences, load_preferences
from grpo_megatron.data.prompt_images import ImageReader
from grpo_megatron.data.prompts import Splits, load_splits
from grpo_megatron.data.tiny_model import init_weights
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import EngineError, RewardError, raised_as
from grpo_megatron.network import Endpoint, wait_for_endpoint
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.engine_images import engine_images
from grpo_megatron.rollout.members import read_members
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.worker_client import WorkerClient, WorkerPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event


@dataclass
class Resources:
    """Everything open that one run needs. Only `run.py` takes parts out of it, and gives each part
    by name what it needs."""

    tokenizer: TextTokenizer
    splits: Splits
    trainer: TrainerLink
    dispatcher: ChunkDispatcher
    rewards: RewardPool
    publisher: Publisher
    teachers: ServedTeachers
    judges: EngineControl  # those that pause while the trainer works
    preferences: Preferences | None = None  # of a run that trains them


@contextlib.asynccontextmanager
async def open_resources(config: RunConfig, run_dir: RunDir) -> AsyncIterator[Resources]:
    """Wait for engines and trainer; close everything at the end.

    Raises EngineError: no replica came up, or a teacher or a judge does not answer; MismatchError:
    a teacher has another tokenizer; DataError, RewardError: problems or rewards are no good."""
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, run_dir.rollouts.parent, ignore_errors=True)
        trainer = TrainerLink(config.trainer.command_timeout_s)
        if config.model.path is None and not (run_dir.model / "model.safetensors").exists():
            init_weights(run_dir.model, config.seed)
        await trainer.listen(run_dir.endpoints / "controller.json")
        stack.push_async_callback(trainer.close)
        model = config.model.path or run_dir.model
        tokenizer = load_tokenizer(model)
        preferences = None
        if config.trains_preferences:
            preferences = load_preferences(config, tokenizer, recorded_answers(config, tokenizer))
            _show_dropped(preferences)
            splits = preferences.splits
        else:
            keep = ImageFolder(run_dir.images).keep
            images = ImageReader.of_model(model, tokenizer, keep)
            splits = load_splits(config, tokenizer, images)
        reward_hosts = await _find_reward_hosts(config, run_dir)
        rewards = await stack.enter_async_context(_reward_pool(config, run_dir, reward_hosts))
        teachers = ServedTeachers(config)
        stack.push_async_callback(teachers.close)
        await _meet_teachers(teachers, splits)
        judges = await _wake_judges(config, stack)
        show_phase("starting")
        engines = ReplicaPool(
            await _connect_replicas(config, run_dir, stack),
            max_attempts=config.rollout.max_attempts,
            on_death=lambda replica: _on_replica_death(run_dir, replica),
            may_return=partial(_may_return, config, run_dir, "rollout"),
        )
        worker_pool = WorkerPool(
            await _connect_workers(config, run_dir, stack),
            on_death=lambda index, cause: _on_worker_death(run_dir, index, cause),
            can_wait=lambda: any(
                _may_return(config, run_dir, "worker", index) for index in _present(config, run_dir)
            ),
        )
        publisher = Publisher(config, run_dir, trainer, engines, engine_images(run_dir, model))
        await stack.enter_async_context(Rejoining(config, run_dir, engines, worker_pool, publisher))
        yield Resources(
            tokenizer=tokenizer,
            splits=splits,
            trainer=trainer,
            dispatcher=ChunkDispatcher(config, engines, worker_pool, run_dir.rollouts),
            rewards=rewards,
            publisher=publisher,
            teachers=teachers,
            judges=judges,
            preferences=preferences,
        )


async def _find_reward_hosts(config: RunConfig, run_dir: RunDir) -> list[Endpoint]:
    """Return the reward hosts that came up. Raises RewardError where none did."""
    hosts = []
    failure: RewardError | None = None
    for index in range(config.data.reward_hosts):
        name = f"reward-host-{index}"
        try:
            endpoint = await asyncio.to_thread(
                wait_for_endpoint,
                run_dir.endpoints / f"{name}.json",
                config.rollout.startup_timeout_s,
                partial(is_expected, run_dir, name),
                RewardError,
            )
        except RewardError as error:
            failure = error
            show("message", text=f"going on without a reward host: {error.message}")
            continue
        hosts.append(endpoint)
    if failure is not None and not hosts:
        raise failure
    return hosts


def _show_dropped(preferences: Preferences) -> None:
    """Say which rows are not trained."""
    if preferences.dropped:
        show("message", text="not trained: " + "; ".join(preferences.dropped))


def _reward_pool(config: RunConfig, run_dir: RunDir, hosts: Sequence[Endpoint]) -> RewardPool:
    if config.num_replicas == 0:  # there are no answers to score
        return RewardPool((), num_workers=0)
    data = config.data
    return RewardPool(
        config.domains,
        num_workers=data.reward_workers,
        timeout_s=data.reward_timeout_s,
        concurrency=data.reward_concurrency,
        log_path=run_dir.logs / "rewards.log",
        budgets={domain.name: config.max_new_tokens_of(domain.name) for domain in config.domains},
        hosts=hosts,
    )


async def _meet_teachers(teachers: ServedTeachers, splits: Splits) -> None:
    """Compare tokenizers on the first prompt of every domain."""
    first_prompts = [prompts[0] for prompts in splits.train.values() if prompts]
    with raised_as(
        EngineError,
        "a teacher does not answer",
        EngineError,
        where="distillation.teachers",
        remedy="is its server up?",
    ):
        await teachers.meet(first_prompts)


async def _wake_judges(config: RunConfig, stack: contextlib.AsyncExitStack) -> EngineControl:
    """Connect to the shared servers; an earlier attempt may have left them asleep."""
    clients = []
    for url in config.placement.shared_servers:
        clients.append(await stack.enter_async_context(EngineClient(url)))
    judges = EngineControl(clients, asleep=config.placement.gpus_per_node > 0)
    with raised_as(
        EngineError,
        "a judge cannot be woken",
        EngineError,
        where="placement.shared_servers",
        remedy="is it up? It needs VLLM_SERVER_DEV_MODE=1, and on GPUs --enable-sleep-mode",
    ):
        await judges.resume()
    return judges


async def _connect_replicas(
    config: RunConfig, run_dir: RunDir, stack: contextlib.AsyncExitStack
) -> list[EngineClient | None]:
    """Connect to the engines; returns clients by replica, None for those that did not come up,
    which are named. Raises EngineError: none did."""

    async def connect(index: int) -> EngineClient:
        client = await connect_engine(config, run_dir, index)
        return await stack.enter_async_context(client)

    indices = _present(config, run_dir)
    clients: list[EngineClient | None] = [None] * (max(indices, default=-1) + 1)
    failures: list[BaseException] = []
    results = await asyncio.gather(*(connect(index) for index in indices), return_exceptions=True)
    for index, result in zip(indices, results, strict=True):
        if isinstance(result, BaseException):
            failures.append(result)
        else:
            clients[index] = result
    for error in failures:
        if not isinstance(error, EngineError) or len(failures) == len(indices):
            raise error
        show("message", text=f"going on without an engine: {error.message}")
    return clients


async def _connect_workers(
    config: RunConfig, run_dir: RunDir, stack: contextlib.AsyncExitStack
) -> dict[int, WorkerClient]:
    """Connect to the rollout workers; returns those that came up, by replica. Raises EngineError:
    none did."""
    workers: dict[int, WorkerClient] = {}
    failure: EngineError | None = None
    for index in _present(config, run_dir):
        try:
            client = await connect_worker(config, run_dir, index)
        except EngineError as error:
            failure = error
            continue
        workers[index] = await stack.enter_async_context(client)
    if failure is not None and not workers:
        raise failure
    return workers


def _present(config: RunConfig, run_dir: RunDir) -> list[int]:
    """Return numbers of the engines that take requests, or will."""
    members = read_members(run_dir, config)
    return [index for index, membership in members.items() if membership == "present"]


def _may_return(config: RunConfig, run_dir: RunDir, role: str, index: int) -> bool:
    """Whether a server or worker that has died may be started again."""
    return config.engine_restarts > 0 and is_expected(run_dir, f"{role}-{index}")


def _on_worker_death(run_dir: RunDir, index: int, cause: EngineError) -> None:
    name = f"worker-{index}"
    show("message", text=f"{name} has gone; its prompts go to the others")
    append_event(run_dir.events, "worker_lost", role=name, cause=cause.message)


def _on_replica_death(run_dir: RunDir, replica: Replica) -> None:
    name = replica.client.name
    cause = str(replica.cause_of_death)
    logging.getLogger(__name__).warning("%s is dead: %s", name, cause)
    show("message", text=f"{name} is dead; its requests go to the others")
    append_event(run_dir.events, "engine_dead", role=name, cause=cause)
