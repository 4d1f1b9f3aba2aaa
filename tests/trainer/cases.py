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
from grpo_megatron.trainer import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.distributed import RankInfo, initialize, model_groups, seed_everything
from grpo_megatron.trainer.policy import Policy, build_policy
from grpo_megatron.trainer.step import logprob_pass, prepare, train_step
from grpo_megatron.weights.gather import plan_gather, stream
from grpo_megatron.weights.rules import rules_for
from grpo_megatron.weights.shards import Shard, local_shards

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)


class Setup:
    """A policy at one layout, started from a Hugging Face checkpoint."""

    def __init__(self, model: str, layout: dict[str, Any], hf_overrides: dict | None = None):
        import json
        info = RankInfo.from_environment()
        self.layout = TrainerConfig(**{
            "num_ranks": info.world_size, "precision": "float32", "num_threads": 1,
            "max_tokens_per_microbatch": 64, **layout})
        initialize(self.layout, info)
        seed_everything(1)
        self.hf = json.loads((Path(model) / "config.json").read_text()) | (hf_overrides or {})
        self.tied = self.hf.get("tie_word_embeddings", False)
        self.rules = rules_for(self.hf["model_type"])
        self.policy: Policy = build_policy(self.hf, self.layout, OPTIMIZER)
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
                   hf_overrides: dict | None = None) -> np.ndarray | None:
    """Log-probs of all policy tokens in table order, on rank 0 (layouts with PP = DP = 1)."""
    setup = Setup(model, layout, hf_overrides)
    batch = setup.batch(samples)
    found = logprob_pass(setup.policy, batch)
    by_row: dict[int, np.ndarray] = {}
    for microbatch, logprobs in zip(batch.microbatches, found, strict=True):
        parts = torch.split(logprobs, microbatch.token_counts.tolist())
        for row, part in zip(microbatch.table_rows.tolist(), parts, strict=True):
            by_row[row] = part.numpy()
    return np.concatenate([by_row[row] for row in sorted(by_row)])
