"""The commands a trainer executes. Every rank runs every command; rank 0 answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.algorithms.objective import supervised_loss
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.distributed import (
    damage,
    load_checkpoint,
    load_model,
    read_state,
    save_checkpoint,
)
from grpo_megatron.checkpoints.durable import copy_side_files
from grpo_megatron.checkpoints.hf_export import export_model
from grpo_megatron.checkpoints.hf_import import check_all_used, import_weights
from grpo_megatron.checkpoints.torch_dist import is_torch_dist
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.distributed import model_groups
from grpo_megatron.trainer.gaps import logprob_gaps
from grpo_megatron.trainer.megatron_fixes import create_adam_state
from grpo_megatron.trainer.platform import peak_memory_bytes
from grpo_megatron.trainer.policy import build_policy
from grpo_megatron.trainer.publish import WeightPublisher
from grpo_megatron.trainer.reference import References
from grpo_megatron.trainer.rl_update import train_rollouts
from grpo_megatron.trainer.schedule import learning_rate
from grpo_megatron.trainer.step import logprob_pass, prepare, train_step
from grpo_megatron.weights.rules import rules_for
from grpo_megatron.weights.shards import local_shards


class TrainerService:
    """The policy and what the controller may ask of it.

    Args:
        model_path: Hugging Face directory; the model starts from its weights.
    """

    def __init__(self, config: RunConfig, model_path: Path):
        self.config, self.model_path = config, model_path
        self.hf = json.loads((model_path / "config.json").read_text())
        self.policy = build_policy(self.hf, config.trainer, config.optimizer,
                                   config.routing.router_policy)
        self.policy.set_temperature(config.rollout.temperature)
        self.rules = rules_for(self.hf["model_type"])
        self.shards = list(local_shards(self.policy.chunks, self.policy.num_experts,
                                        model_groups()))
        self.tied = self.hf.get("tie_word_embeddings", False)
        self.publisher = WeightPublisher(self.shards, self.rules, self.policy.attention_shape,
                                         self.hf["vocab_size"], config.publish,
                                         tied_embeddings=self.tied)
        self.load_hf(model_path)
        self.references = References(config)
        if self.references.wanted:
            self.references.read_files(self.policy, self.load_hf)

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"train": self.train, "gaps": self.gaps, "supervise": self.supervise,
                "logprobs": self.logprobs, "reset_optimizer": self.reset_optimizer,
                "take_reference": self.take_reference, "save": self.save, "load": self.load,
                "damage": self.damage,
                "export": self.export, "publish_open": self.publisher.open,
                "publish_join": self.publisher.join, "publish_send": self.publisher.send}

    def load_hf(self, directory: Path) -> None:
        """Read a Hugging Face checkpoint; refuse tensors that no rank wanted.

        A converted checkpoint, or one of a run, serves as well.
        """
        if is_torch_dist(directory):
            load_model(directory / "weights", self.policy.chunks)
            self.policy.reload_main_parameters()
            return
        used = import_weights(self.shards, self.rules, self.policy.attention_shape, directory,
                              vocab_size=self.hf["vocab_size"], tied_embeddings=self.tied)
        world: list = [None] * dist.get_world_size()
        dist.all_gather_object(world, used)
        check_all_used(directory, set().union(*world))
        self.policy.reload_main_parameters()

    def train(self, directory: str, first_update: int, num_updates: int,
              state: dict[str, float], replayed: bool = False) -> dict[str, Any]:
        """Train all updates of a recorded step (see `train_rollouts`)."""
        table = SampleTable(Path(directory), verify=dist.get_rank() == 0)
        report = train_rollouts(self.config, self.policy, self.references, table, first_update,
                                num_updates, state, replayed)
        interval = self.config.objective.reference_interval
        if interval and self.references.wanted and (table.manifest["step"] + 1) % interval == 0:
            self.references.refresh(self.policy)
        report["metrics"]["trainer/peak_memory_gib"] = peak_memory_bytes() / 2**30
        return report

    def gaps(self, directory: str, to: str, by_layer: bool) -> dict[str, Any]:
        """Log-probs of a recorded step under several routings, written to `to`."""
        table = SampleTable(Path(directory), verify=dist.get_rank() == 0)
        return logprob_gaps(self.config, self.policy, table, Path(to), by_layer=by_layer)

    def take_reference(self) -> dict[str, Any]:
        """RL begins: the policy as it is now is its own reference."""
        if self.references.wanted:
            self.references.take(self.policy)
        return {}

    def supervise(self, directory: str, first_update: int) -> dict[str, Any]:
        """One supervised optimizer step per update of the recorded step."""
        table = SampleTable(Path(directory), verify=dist.get_rank() == 0)
        settings, total = self.config.cold_start, Stats()
        for update in range(int(table.update.max()) + 1):
            rate = learning_rate(settings.optimizer, first_update + update, settings.max_steps)
            rows = np.flatnonzero(table.update == update)
            weight = 1.0 / max(int(table.completion_lengths[rows].sum()), 1)
            self.policy.set_learning_rate(rate)
            batch = prepare(self.config.trainer, table, rows)
            total.add(train_step(self.policy, batch, lambda _, output, weight=weight:
                                 supervised_loss(output[0], weight)))
        return {"metrics": {name: value for name, value in total.result().items()
                            if name != "loss/value"}}

    def logprobs(self, directory: str) -> dict[str, Any]:
        """Largest and mean |trainer - recorded| log-prob over a recorded step's policy tokens."""
        table = SampleTable(Path(directory), verify=False)
        rows = np.arange(len(table))
        batch = prepare(self.config.trainer, table, rows)
        found = [output[0] for output in logprob_pass(self.policy, batch)]
        largest, total, count = 0.0, 0.0, 0
        for microbatch, logprobs in zip(batch.microbatches, found, strict=True):
            if len(logprobs):
                gap = (logprobs - microbatch.rollout_logprobs).abs()
                largest = max(largest, float(gap.max()))
                total, count = total + float(gap.sum()), count + len(gap)
        world: list = [None] * dist.get_world_size()
        dist.all_gather_object(world, (largest, total, count))
        largest, total, count = (max(w[0] for w in world), sum(w[1] for w in world),
                                 sum(w[2] for w in world))
        return {"abs_max": largest, "abs_mean": total / max(count, 1), "tokens": count}

    def reset_optimizer(self, cold_start: bool) -> dict[str, Any]:
        """Drop all moments; take the settings of the cold start or of RL."""
        config = self.config
        self.policy.reset_optimizer(config.cold_start.optimizer if cold_start
                                    else config.optimizer)
        return {}

    def save(self, directory: str, state: dict[str, Any]) -> dict[str, Any]:
        create_adam_state(self.policy.optimizer)  # it has none before its first step
        reference = self.references.save(self.policy, Path(directory))
        save_checkpoint(Path(directory), self.policy.chunks, self.policy.optimizer,
                        {**state, "reference": reference},
                        lambda working: copy_side_files(self.model_path, working))
        return {}

    def damage(self, directory: str) -> dict[str, Any]:
        """`files` of a checkpoint and of the reference that it names which are not as written."""
        path = Path(directory)
        files = [f"{path.name}/{name}" for name in damage(path)]
        if not files and (name := read_state(path).get("reference")):
            files = [f"{name}/{file}" for file in damage(path.with_name(name))]
        return {"files": files}

    def load(self, directory: str) -> dict[str, Any]:
        if reference := read_state(Path(directory)).get("reference"):
            self.references.load(self.policy, Path(directory), reference)
        state = load_checkpoint(Path(directory), self.policy.chunks, self.policy.optimizer,
                                create_adam_state)
        if self.references.wanted and not reference:  # the objective is another one since
            self.references.take(self.policy)
        return {name: value for name, value in state.items() if name != "reference"}

    def export(self, directory: str) -> dict[str, Any]:
        """Write a Hugging Face checkpoint and read it back (see `export_model`)."""
        return {"bytes": export_model(
            self.publisher.gather_plan, self.shards, self.policy.attention_shape,
            Path(directory), self.model_path, vocab_size=self.hf["vocab_size"])}
