"""What the worker groups execute. Imported in the workers, so torch and Megatron are at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import asdict

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.critic import CriticConfig
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.passes import num_whole_passes
from grpo_megatron.config.run import DistillationConfig, RoutingConfig, RunConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.errors import TrainerError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer.megatron import platform
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.requests import TrainReport
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.critic import build_critic
from grpo_megatron.trainer.steps.microbatch import UpdateBatch, build_microbatch
from grpo_megatron.trainer.steps.optimizer_step import (
    logprob_pass,
    prepare,
    train_step,
)
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.trainer.steps.teachers import Teachers
from grpo_megatron.trainer.steps.token_update import train_tokens
from grpo_megatron.weights.gather import Shard, ShardedModel
from tests.trainer.worker_group import fresh_store

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)


_earlier: list[Policy] = []


def release(policy: Policy) -> None:
    """DDP's backward hooks refer back to it through autograd nodes, which no collector sees.

    Without this every case would leave its process groups behind, with two threads each.
    """
    for chunk in policy.chunks:
        chunk.__dict__.clear()


def state_tensors(policy: Policy) -> list[torch.Tensor]:
    """List parameters and buffers of this rank's model, in a fixed order."""
    tensors = []
    for model in policy.models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensors.append(tensor.data)
    return tensors


class Setup:
    """A policy at one layout, started from a Hugging Face checkpoint."""

    def __init__(
        self,
        model: str,
        layout: dict[str, Any],
        hf_overrides: dict | None = None,
        lora: LoraConfig | None = None,
        *,
        num_scalars: int = 0,
        has_value_head: bool = False,
        optimizer: OptimizerConfig = OPTIMIZER,
    ):
        info = RankInfo.from_environment()
        self.layout = TrainerConfig(
            **{
                "num_ranks": info.world_size,
                "precision": "float32",
                "num_threads": 1,
                "max_tokens_per_microbatch": 128,
                **layout,
            }
        )
        while _earlier:
            release(_earlier.pop())
        initialize(self.layout, info, fresh_store())
        seed_everything(1)
        self.hf = read_config(Path(model)) | (hf_overrides or {})
        self.policy: Policy = build_policy(
            self.hf,
            self.layout,
            optimizer,
            lora=lora,
            num_scalars=num_scalars,
            has_value_head=has_value_head,
        )
        _earlier.append(self.policy)
        self.shards = self.policy.sharded.shards
        import_weights(self.policy.sharded, Path(model))
        self.policy.optimizer.reload_model_params()

    def batch(self, directory: str):
        table = SampleTable(Path(directory))
        return prepare(self.layout, table, np.arange(len(table)))

    def config(self, **objective) -> RunConfig:
        """A recipe of two domains around this layout."""
        domain = {
            "source": "file",
            "path": "x",
            "rewards": [
                {"function": "a:b", "name": "first"},
                {"function": "a:b", "name": "second"},
            ],
        }
        return RunConfig.model_validate(
            {
                "name": "case",
                "model": {"preset": "tiny-qwen3-moe"},
                "optimizer": OPTIMIZER,
                "trainer": self.layout,
                "objective": objective,
                "domains": [{"name": "even", **domain}, {"name": "odd", **domain}],
            }
        )

    def routing(self, settings: dict[str, Any]) -> RoutingConfig:
        return RoutingConfig(**settings)

    def gather(self, shards: list[Shard]) -> dict[str, np.ndarray] | None:
        """Full tensors under Hugging Face names, on rank 0."""
        model = ShardedModel(self.policy.sharded.map, shards)
        found = {
            name: tensor.float().cpu().numpy().copy()
            for name, tensor in model.stream(model.entries, [0] * len(model.entries))
        }
        return found if dist.get_rank() == 0 else None


def train_updates(
    model: str,
    samples: str,
    layout: dict[str, Any],
    *,
    gradients: bool = False,
    preset: str = "grpo",
    objective: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All updates of recorded rollouts: metrics, and the weights after them.

    `gradients`: the averaged gradients of the last update instead (without the distributed
    optimizer, which leaves each rank only a part of them).
    """
    setup = Setup(model, {**layout, **({"distributed_optimizer": False} if gradients else {})})
    config = setup.config(preset=preset, **(objective or {}))
    if routing is not None:
        config = config.model_copy(update={"routing": RoutingConfig(**routing)})
    report = Training(config, setup.policy, References(config), SampleTable(Path(samples)), {}).run(
        0, 3
    )
    parts = setup.shards
    if gradients:
        # clip scaled them: undo it, so that the comparison is before clipping
        scale = max(report.grad_norms[-1] / OPTIMIZER.clip_grad, 1.0)
        parts = [replace(s, tensor=s.tensor.main_grad * scale) for s in setup.shards]
    batch = setup.batch(samples)
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "tensors": setup.gather(parts),
        "num_microbatches": len(batch.microbatches),
        "computed_fraction": report.metrics["batch/computed_token_fraction"],
        "split_prompts": report.metrics["routing/split_prompts"],
    }


def train_and_replay(model: str, samples: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """All updates of a step that clips, and again by the decisions that were recorded."""
    found = []
    for replayed in (False, True):
        setup = Setup(model, layout)
        config = setup.config(preset="dapo", clip_low=1e-4, clip_high=1e-4, monitor_share=1.0)
        table = SampleTable(Path(samples))
        report = Training(
            config, setup.policy, References(config), table, {}, replayed=replayed
        ).run(0, 2)
        found.append(asdict(report))
    return found


def train_objectives(
    model: str, samples: str, layout: dict[str, Any], objectives: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """All updates with each objective in turn, every time from the same weights."""
    setup, found = Setup(model, layout), {}
    start, table = [s.tensor.detach().clone() for s in setup.shards], SampleTable(Path(samples))
    for name, objective in objectives.items():
        for shard, tensor in zip(setup.shards, start, strict=True):
            shard.tensor.data.copy_(tensor)
        setup.policy.optimizer.reload_model_params()
        setup.policy.reset_optimizer(OPTIMIZER)
        config = setup.config(**objective)
        slow = config.optimizer.model_copy(update={"lr": 1e-4})  # Adam amplifies rounding
        config = config.model_copy(update={"optimizer": slow})
        references = References(config)
        if references.wanted:
            _perturb(setup.shards, 1.01)
            references.snapshot(setup.policy)
            for shard, tensor in zip(setup.shards, start, strict=True):
                shard.tensor.data.copy_(tensor)
        critic = None
        if config.objective.advantage == "gae":
            settings = CriticConfig(optimizer=slow)
            config = config.model_copy(update={"critic": settings})
            critic = build_critic(config, settings, setup.policy)
            _earlier.append(critic.model)
        training = Training(config, setup.policy, references, table, {}, critic=critic)
        found[name] = asdict(training.run(0, 3))
        found[name]["metrics"].pop("time/critic_s", None)
    return found


def distil(
    model: str, samples: str, layout: dict[str, Any], distillation: dict[str, Any], repeats: int = 1
) -> dict[str, Any]:
    """Updates to teachers: losses, norms, metrics, gradients of the last; full KL after all."""
    setup = Setup(model, layout | {"distributed_optimizer": False})
    config = setup.config().model_copy(
        update={"kind": "distil", "distillation": DistillationConfig(**distillation)}
    )
    teachers = Teachers(
        config, config.distillation, lambda path: import_weights(setup.policy.sharded, path)
    )
    table, before = SampleTable(Path(samples)), [s.tensor.clone() for s in setup.shards]
    batch = prepare(setup.layout, table, np.arange(len(table)))
    teachers.compute_targets(setup.policy, batch, table)
    unchanged = all(torch.equal(s.tensor, b) for s, b in zip(setup.shards, before, strict=True))
    report = TrainReport(metrics={}, state={}, updates=0, tokens=0, grad_norms=[0.0])
    for _ in range(repeats):
        report = train_tokens(config, setup.policy, table, config.optimizer, 0, 3, teachers)
    scale = max(report.grad_norms[-1] / OPTIMIZER.clip_grad, 1.0)
    tensors = setup.gather([replace(s, tensor=s.tensor.main_grad * scale) for s in setup.shards])
    teachers.settings = teachers.settings.model_copy(update={"mode": "full"})
    full = config.model_copy(
        update={
            "distillation": teachers.settings,
            "optimizer": config.optimizer.model_copy(update={"lr": 1e-30}),
        }
    )
    after = train_tokens(full, setup.policy, table, full.optimizer, 0, 3, teachers)
    return {
        **asdict(report),
        "norms": report.grad_norms,
        "unchanged": unchanged,
        "tensors": tensors,
        "last_kl": after.metrics["distillation/kl"],
    }


def supervise(model: str, samples: str, routing: dict[str, Any]) -> dict[str, Any]:
    """Three supervised updates, as those of a cold start."""
    setup = Setup(model, {})
    config = setup.config().model_copy(update={"routing": RoutingConfig(**routing)})
    table = SampleTable(Path(samples))
    return asdict(train_tokens(config, setup.policy, table, config.optimizer, 0, 3))


def _perturb(shards: list[Shard], factor: float) -> None:
    for shard in shards:
        shard.tensor.data.mul_(factor)


def token_logprobs(
    model: str,
    samples: str,
    layout: dict[str, Any],
    hf_overrides: dict | None = None,
    temperature: float = 1.0,
) -> np.ndarray | None:
    """Log-probs of all policy tokens in table order, on rank 0 (layouts with PP = DP = 1)."""
    setup = Setup(model, layout, hf_overrides)
    for model in setup.policy.models:
        model.temperature = temperature
    by_row = _by_row(setup.policy, setup.batch(samples))
    return np.concatenate([by_row[row] for row in sorted(by_row)])


def _by_row(policy: Policy, batch: UpdateBatch) -> dict[int, np.ndarray]:
    """This rank's log-probs by table row."""
    by_row: dict[int, np.ndarray] = {}
    for microbatch, logprobs in zip(batch.microbatches, logprob_pass(policy, batch), strict=True):
        counts = torch.bincount(microbatch.sample, minlength=len(microbatch.table_rows))
        parts = torch.split(logprobs[0], counts.tolist())
        for row, part in zip(microbatch.table_rows.tolist(), parts, strict=True):
            by_row[row] = part.numpy()
    return by_row


def gradients_of(model: str, samples: str, alone: bool) -> dict[str, Any]:
    """One step on all samples, in one micro-batch or in one each (single process)."""
    layout = {"distributed_optimizer": False, "max_tokens_per_microbatch": 100_000}
    setup = Setup(model, layout)
    batch = setup.batch(samples)
    if alone:
        table = SampleTable(Path(samples))
        batch = replace(
            batch,
            microbatches=tuple(
                build_microbatch(row, table, np.array([row]), pad_to=1, device=platform.device())
                for row in range(len(table))
            ),
        )
    logprobs = _by_row(setup.policy, batch)
    stats = train_step(setup.policy, batch, loss_of(setup, samples))
    return {
        "logprobs": logprobs,
        "num_microbatches": len(batch.microbatches),
        "losses": [stats.result()["loss/value"]],
        "norms": [stats.result()["grad/norm"]],
        "tensors": setup.gather([replace(s, tensor=s.tensor.main_grad) for s in setup.shards]),
    }


def loss_of(setup: Setup, samples: str):
    """GRPO's loss of all samples as one on-policy update."""
    config, table = setup.config(preset="grpo"), SampleTable(Path(samples))
    objective, batch = objective_of(config, {}), sample_batch(config, table)
    rows = torch.arange(len(table))
    constants = loss_constants(objective, batch, advantages_of(objective, batch), rows, 20)

    def loss(microbatch, output):
        logprobs, entropies = output.unbind(0)
        return policy_loss(
            objective,
            constants.loss_batch(
                torch.from_numpy(microbatch.episodes),
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                rollout_logprobs=microbatch.rollout_logprobs,
                entropies=entropies,
            ),
        )

    return loss


def train_rows(
    model: str, samples: str, layout: dict[str, Any], rows: np.ndarray
) -> dict[str, Any]:
    """Three steps on some rows only."""
    setup = Setup(model, layout)
    batch = prepare(setup.layout, SampleTable(Path(samples)), rows)
    found = [train_step(setup.policy, batch, loss_of(setup, samples)).result() for _ in range(3)]
    return {
        "losses": [m["loss/value"] for m in found],
        "norms": [m["grad/norm"] for m in found],
        "tensors": setup.gather(setup.shards),
    }


def not_a_number(model: str, samples: str, kind: str) -> tuple[list[str], bool]:
    """What every rank raises when the last one's loss or gradient is no finite number."""
    setup = Setup(model, {})
    batch, before = setup.batch(samples), [s.tensor.detach().clone() for s in setup.shards]

    def loss(microbatch, output):
        value, stats = loss_of(setup, samples)(microbatch, output)
        if dist.get_rank() == dist.get_world_size() - 1:
            if kind == "gradient":  # a finite value whose derivative is not
                value = value + (output - output.detach()).abs().sum().sqrt()
            else:
                value = value + {"nan": torch.nan, "inf": -torch.inf}[kind]
        return value, stats

    try:
        message = str(train_step(setup.policy, batch, loss))
    except TrainerError as error:
        message = f"TrainerError: {error}"
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, message)
    return world, all(torch.equal(a, s.tensor) for a, s in zip(before, setup.shards, strict=True))


def truncated_logprobs(
    model: str, samples: str, layout: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """In table order: log-probs over kept sets and over the vocabulary [2, n], and bool [n], which
    tokens may be trained (layouts with PP = DP = 1)."""
    setup = Setup(model, {**layout, "max_tokens_per_microbatch": 100_000})
    (microbatch,) = (batch := setup.batch(samples)).microbatches
    (output,) = logprob_pass(setup.policy, batch)
    usable = torch.isfinite(microbatch.rollout_logprobs)
    assert torch.equal(usable, ~microbatch.kept.missing)
    order = np.argsort(microbatch.table_rows[microbatch.sample.numpy()], kind="stable")
    return output[[0, 2]].numpy()[:, order], usable.numpy()[order]


def moving_average(model: str, precision: str, ema: float, times: int) -> dict[str, np.ndarray]:
    """A weight before and after the policy leapt, and of a reference that followed it so often."""
    setup = Setup(model, {"precision": precision})
    config = setup.config(
        preset="grpo", kl="k3", kl_beta=0.1, reference_interval=1, reference_ema=ema
    )
    references = References(config)
    references.snapshot(setup.policy)
    [weight] = [
        shard.tensor
        for shard in setup.shards
        if "layers.0.self_attention.linear_proj" in shard.name
    ]
    before = weight.detach().float().numpy().copy()
    with torch.no_grad():
        weight.mul_(1.05)
    for _ in range(times):
        references.refresh(setup.policy)
    after = weight.detach().float().numpy().copy()
    with references.exchanged(setup.policy):
        found = weight.detach().float().numpy().copy()
    assert np.array_equal(weight.detach().float().numpy(), after)
    return {"before": before, "after": after, "reference": found}


def count_passes(
    model: str,
    samples: str,
    num_updates: int,
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]],
) -> dict[str, tuple[float, int]]:
    """Of an objective and a routing by name, how many whole passes without gradients a step took,
    and how many are planned."""
    found = {}
    for name, (objective, routing) in cases.items():
        setup = Setup(model, {})
        config = setup.config(**{"monitor_share": 0.0, **objective})
        batch = config.batch.model_copy(update={"updates_per_rollout": num_updates})
        config = config.model_copy(update={"routing": RoutingConfig(**routing), "batch": batch})
        references = References(config)
        if references.wanted:
            references.snapshot(setup.policy)
        training = Training(config, setup.policy, references, SampleTable(Path(samples)), {})
        with mock.patch.object(
            optimizer_step, "logprob_pass", wraps=optimizer_step.logprob_pass
        ) as passes:
            training.run(0, num_updates)
        planned = num_whole_passes(config, has_routers=True)
        found[name] = (passes.call_count / num_updates, planned)
    return found
