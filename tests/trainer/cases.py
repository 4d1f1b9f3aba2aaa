"""What the worker groups execute. Imported in the workers, so torch and Megatron are at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.algorithms.aggregation import AGGREGATIONS
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.algorithms.presets import PRESETS
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.errors import TrainerError
from grpo_megatron.trainer import platform
from grpo_megatron.trainer.distributed import RankInfo, initialize, model_groups, seed_everything
from grpo_megatron.trainer.microbatch import build_microbatch
from grpo_megatron.trainer.policy import Policy, build_policy
from grpo_megatron.trainer.step import PreparedBatch, logprob_pass, prepare, train_step
from grpo_megatron.weights.gather import plan_gather, stream
from grpo_megatron.weights.rules import rules_for
from grpo_megatron.weights.shards import Shard, local_shards
from tests.trainer.worker_group import fresh_store

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)


_earlier: list[Policy] = []


def release(policy: Policy) -> None:
    """DDP's backward hooks refer back to it through autograd nodes, which no collector sees.

    Without this every case would leave its process groups behind, with two threads each.
    """
    for chunk in policy.chunks:
        chunk.__dict__.clear()


class Setup:
    """A policy at one layout, started from a Hugging Face checkpoint."""

    def __init__(self, model: str, layout: dict[str, Any], hf_overrides: dict | None = None):
        import json
        info = RankInfo.from_environment()
        self.layout = TrainerConfig(**{
            "num_ranks": info.world_size, "precision": "float32", "num_threads": 1,
            "max_tokens_per_microbatch": 64, **layout})
        while _earlier:
            release(_earlier.pop())
        initialize(self.layout, info, fresh_store())
        seed_everything(1)
        self.hf = json.loads((Path(model) / "config.json").read_text()) | (hf_overrides or {})
        self.tied = self.hf.get("tie_word_embeddings", False)
        self.rules = rules_for(self.hf["model_type"])
        self.policy: Policy = build_policy(self.hf, self.layout, OPTIMIZER)
        _earlier.append(self.policy)
        self.shards = list(local_shards(self.policy.chunks, self.policy.num_experts,
                                        model_groups()))
        import_weights(self.shards, self.rules, self.policy.attention_shape, Path(model),
                       vocab_size=self.hf["vocab_size"], tied_embeddings=self.tied)
        self.policy.reload_main_parameters()

    def batch(self, directory: str, rows: np.ndarray | None = None):
        table = SampleTable(Path(directory))
        rows = np.arange(len(table)) if rows is None else rows
        weights = np.zeros(len(table))
        weights[rows] = AGGREGATIONS["seq_mean_token_mean"](table.completion_lengths[rows])
        return prepare(self.layout, table, rows, weights)

    def gather(self, shards: list[Shard]) -> dict[str, np.ndarray] | None:
        """Full tensors under Hugging Face names, on rank 0."""
        entries = plan_gather(shards, self.rules, tied_embeddings=self.tied)
        found = {name: tensor.float().numpy().copy() for _, name, tensor in stream(
            entries, shards, self.policy.attention_shape, vocab_size=self.hf["vocab_size"],
            receivers=[0] * len(entries))}
        return found if dist.get_rank() == 0 else None


def train_three_steps(model: str, samples: str, layout: dict[str, Any], *, preset: str = "grpo",
                      gradients: bool = False, steps: int = 3) -> dict[str, Any]:
    """Losses and pre-clip gradient norms of three updates, and the weights after them.

    `gradients`: the averaged gradients of the first step instead (without the distributed
    optimizer, which leaves each rank only a part of them).
    """
    setup = Setup(model, {**layout, **({"distributed_optimizer": False} if gradients else {})})
    policy, batch = setup.policy, setup.batch(samples)
    losses, norms, parts = [], [], setup.shards
    old = logprob_pass(policy, batch)
    for _ in range(1 if gradients else steps):
        metrics = train_step(policy, batch, lambda b: policy_loss(PRESETS[preset], b), old)
        losses.append(metrics["loss/value"])
        norms.append(metrics["grad/norm"])
        if gradients:
            # clip scaled them: undo it, so that the comparison is before clipping
            scale = max(metrics["grad/norm"] / OPTIMIZER.clip_grad, 1.0)
            parts = [replace(s, tensor=s.tensor.main_grad * scale) for s in setup.shards]
    return {"losses": losses, "norms": norms, "tensors": setup.gather(parts),
            "num_microbatches": len(batch.microbatches)}


def token_logprobs(model: str, samples: str, layout: dict[str, Any],
                   hf_overrides: dict | None = None, temperature: float = 1.0,
                   ) -> np.ndarray | None:
    """Log-probs of all policy tokens in table order, on rank 0 (layouts with PP = DP = 1)."""
    setup = Setup(model, layout, hf_overrides)
    setup.policy.set_temperature(temperature)
    by_row = _by_row(setup.policy, setup.batch(samples))
    return np.concatenate([by_row[row] for row in sorted(by_row)])


def _by_row(policy: Policy, batch: PreparedBatch) -> dict[int, np.ndarray]:
    """This rank's log-probs by table row."""
    by_row: dict[int, np.ndarray] = {}
    for microbatch, logprobs in zip(batch.microbatches, logprob_pass(policy, batch), strict=True):
        parts = torch.split(logprobs, microbatch.token_counts.tolist())
        for row, part in zip(microbatch.table_rows.tolist(), parts, strict=True):
            by_row[row] = part.numpy()
    return by_row


def gradients_of(model: str, samples: str, alone: bool) -> dict[str, Any]:
    """One step on all samples, in one micro-batch or in one each (single process)."""
    setup = Setup(model, {"max_tokens_per_microbatch": 100_000, "distributed_optimizer": False})
    batch = setup.batch(samples)
    if alone:
        table = SampleTable(Path(samples))
        weights = AGGREGATIONS["seq_mean_token_mean"](table.completion_lengths)
        batch = replace(batch, microbatches=tuple(
            build_microbatch(row, table, np.array([row]), weights, pad_to=1,
                             device=platform.device()) for row in range(len(table))))
    logprobs = _by_row(setup.policy, batch)
    metrics = train_step(setup.policy, batch, lambda b: policy_loss(PRESETS["grpo"], b))
    return {"logprobs": logprobs, "num_microbatches": len(batch.microbatches),
            "losses": [metrics["loss/value"]], "norms": [metrics["grad/norm"]],
            "tensors": setup.gather([replace(s, tensor=s.tensor.main_grad)
                                     for s in setup.shards])}


def train_rows(model: str, samples: str, layout: dict[str, Any],
               rows: np.ndarray) -> dict[str, Any]:
    """Three steps on some rows only."""
    setup = Setup(model, layout)
    batch = setup.batch(samples, rows)
    found = [train_step(setup.policy, batch, lambda b: policy_loss(PRESETS["grpo"], b))
             for _ in range(3)]
    return {"losses": [m["loss/value"] for m in found], "norms": [m["grad/norm"] for m in found],
            "tensors": setup.gather(setup.shards)}


def not_a_number(model: str, samples: str, kind: str) -> tuple[list[str], bool]:
    """What every rank raises when the last one's loss or gradient is no finite number."""
    setup = Setup(model, {})
    batch, before = setup.batch(samples), [s.tensor.detach().clone() for s in setup.shards]

    def loss(b):
        value, stats = policy_loss(PRESETS["grpo"], b)
        if dist.get_rank() == dist.get_world_size() - 1:
            if kind == "gradient":  # a finite value whose derivative is not
                value = value + (b.logprobs - b.logprobs.detach()).abs().sum().sqrt()
            else:
                value = value + {"nan": torch.nan, "inf": -torch.inf}[kind]
        return value, stats

    try:
        message = str(train_step(setup.policy, batch, loss))
    except TrainerError as error:
        message = f"TrainerError: {error}"
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, message)
    return world, all(torch.equal(a, s.tensor) for a, s in
                      zip(before, setup.shards, strict=True))
