"""The whole algorithm in one file: prompts, rollouts, rewards, advantages, loss, update, publish.

    python rl_loop.py [RECIPE [KEY=VALUE ...]]

One trainer rank in this process and one vLLM server beside it, on policy, one optimizer step a
rollout. It is made of the library's parts and takes the steps that `grpo-megatron train` takes with
the same recipe; what that adds is left out: many ranks, resuming, staleness, routing replay,
evaluation, and the proof that trainer and engine compute the same."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# first: it prepares the machine for Megatron, which looks at it when it is imported
import grpo_megatron.trainer.megatron.platform  # noqa: F401  isort: skip

from grpo_megatron.algorithms.advantages.pipeline import advantages_of, select
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.spool import store_groups
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.loader import ResolvedConfig, write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.data.prompts import load_splits
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import EngineError
from grpo_megatron.launch.processes import stop_all
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.network import own_address, wait_for_endpoint
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_sampling import ChunkSampler
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.model_sender import ModelSender
from grpo_megatron.trainer.steps.microbatch import MicroBatch
from grpo_megatron.trainer.steps.optimizer_step import prepare, train_step
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.weights.transfer import listening_store


def main(recipe: str = "rl_loop.toml", *overrides: str) -> None:
    asyncio.run(train(resolve(recipe, overrides)))


async def train(resolved: ResolvedConfig) -> None:
    config = resolved.config
    run_dir = prepared_directory(resolved)
    model_path = config.model.path or run_dir.model
    tokenizer = load_tokenizer(model_path)

    # 1. Prompts: rendered, tokenised, split; drawn by domain and epoch.
    splits = load_splits(config, tokenizer)
    weights = {domain.name: domain.weight for domain in config.domains}
    sampler = PromptSampler(splits.train, weights, config.seed, config.curriculum)

    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(config, run_dir))
        policy = trained_policy(config, model_path)
        objective = objective_of(config, state={})
        rollout = ChunkSampler(
            config,
            ReplicaPool([engine]),
            stop_token_ids=tokenizer.stop_token_ids,
            decode=tokenizer.decode,
        )
        rewards = await stack.enter_async_context(reward_pool(config, run_dir))
        weights_to_engine = await connect(config, policy, engine)
        await weights_to_engine.publish(0)

        for step in range(config.num_steps):
            prompts = sampler.draw(config.batch.num_prompts)
            # 2. Rollouts: a group of samples for every prompt, with the engine's log-probs. A run
            #    has this done, and written, by a process beside every engine.
            sampled = await rollout.rollouts(step, prompts)
            groups = store_groups(run_dir.rollouts / str(step), sampled)
            # 3. Rewards: of every sample, in processes of their own.
            scored = await rewards.score(groups)
            # 4. The hand-over: an immutable, checksummed directory.
            directory = run_dir.step_store(step)
            facts = StepFacts(step=step, version=step, domains=list(weights))
            record_step(directory, scored, 1, facts, tokenizer.decode)
            # 5. to 8. Advantages, loss, gradients, optimizer.
            stats = update(policy, objective, config, SampleTable(directory), step)
            # 9. Publish: the engine samples the next step from these weights.
            await weights_to_engine.publish(step + 1)
            show(step, scored, stats)


def update(
    policy: Policy, objective: Objective, config: RunConfig, table: SampleTable, step: int
) -> Stats:
    """Take the optimizer step of a recorded rollout; return its metrics."""
    batch = sample_batch(config, table)  # N samples in groups, with rewards and lengths
    rows = select(objective, batch).nonzero()[:, 0]  # int64: those that are trained

    # 5. Advantages: from rewards, group by group. float64 [N]
    advantages = advantages_of(objective, batch)
    # 6. The weight of every token, which holds the denominators of the whole step.
    constant_length = config.objective.aggregation_length or config.rollout.max_new_tokens
    constants = loss_constants(objective, batch, advantages, rows, constant_length)

    # 7. The loss of one micro-batch. output: fp32 [2, n], log-probs and entropies of its n tokens.
    def loss_of(microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        logprobs, entropies = output[:2].unbind(0)
        loss_batch = constants.loss_batch(
            torch.from_numpy(microbatch.table_rows),
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),  # on policy: the ratio is 1, its gradient is not 0
            rollout_logprobs=microbatch.rollout_logprobs,
            entropies=entropies,
        )
        return policy_loss(objective, loss_batch)

    # 8. Forward and backward over all micro-batches, clipping, Adam.
    prepared = prepare(config.trainer, table, rows.numpy())
    policy.set_learning_rate(config.optimizer.rate(step, config.num_steps))
    return train_step(policy, prepared, loss_of)


# --- the trainer


def trained_policy(config: RunConfig, model_path: Path) -> Policy:
    """Megatron's model and optimizer with the weights of a Hugging Face directory."""
    info = RankInfo(rank=0, local_rank=0, world_size=1)
    timeout = timedelta(seconds=config.trainer.command_timeout_s)
    initialize(config.trainer, info, listening_store(own_address(), 1, timeout))
    seed_everything(config.seed)
    policy = build_policy(
        read_config(model_path),
        config.trainer,
        config.optimizer,
        router_policy=config.routing.router_policy,
        temperature=config.rollout.temperature,
    )
    import_weights(policy.sharded, model_path)
    policy.optimizer.reload_model_params()  # its fp32 copies follow
    return policy


# --- the engine


@contextlib.asynccontextmanager
async def running_engine(config: RunConfig, run_dir: RunDir) -> AsyncIterator[EngineClient]:
    """A vLLM server of the run, and the client that speaks with it."""
    [server] = LocalProcesses(config, run_dir).replicas()
    server.start()
    try:
        limit_s = config.rollout.startup_timeout_s
        file = run_dir.endpoints / "rollout-0.json"
        found = await asyncio.to_thread(
            wait_for_endpoint, file, limit_s, lambda: server.alive, EngineError
        )
        url = f"http://{found.host}:{found.port}"
        async with EngineClient(url, server.name, token=found.token) as client:
            await client.wait_ready(limit_s, lambda: server.alive)
            yield client
    finally:
        stop_all([server])


@dataclass
class WeightsToEngine:
    """Both ends of a publish: who sends, and who tells the engine to receive."""

    source: ModelSender
    target: EngineControl

    async def publish(self, version: int) -> None:
        """Stream all weights; digests of both ends are compared before the engine goes on."""

        async def send() -> Mapping[str, str]:
            return (await asyncio.to_thread(self.source.send, version)).digests

        await self.target.publish(version, send)


async def connect(config: RunConfig, policy: Policy, engine: EngineClient) -> WeightsToEngine:
    source = ModelSender(policy.sharded, config.publish)
    target = EngineControl([engine])
    streams = source.open(await target.kept_boxes(source.tensors()))
    await target.prepare(streams, lambda: asyncio.to_thread(source.join))
    return WeightsToEngine(source, target)


# --- around it


def prepared_directory(resolved: ResolvedConfig) -> RunDir:
    """A run directory with the configuration, and with a random model where none was given."""
    config = resolved.config
    run_dir = RunDir(resolved.run_path).begin()
    write_resolved(run_dir.config, resolved)
    if config.model.path is None:
        write_tiny_model(run_dir.model, load_preset(str(config.model.preset)))
        init_weights(run_dir.model, config.seed)
    return run_dir


def reward_pool(config: RunConfig, run_dir: RunDir) -> RewardPool:
    return RewardPool(
        config.domains,
        num_workers=config.data.reward_workers,
        timeout_s=config.data.reward_timeout_s,
        log_path=run_dir.logs / "rewards.log",
        budgets={domain.name: config.max_new_tokens_of(domain.name) for domain in config.domains},
    )


def show(step: int, scored: list[Any], stats: Stats) -> None:
    found = stats.result()
    rewards = [float(reward) for group in scored for reward in group.rewards]
    line = {
        "step": step,
        "reward/mean": sum(rewards) / len(rewards),
        "loss/value": found["loss/value"],
        "grad/norm": found["grad/norm"],
        "policy/entropy": found["policy/entropy"],
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        os.chdir(Path(__file__).parent)  # of the recipe, and of the reward that it names
    main(*sys.argv[1:])
    os._exit(0)  # threads of libraries must not delay the end
