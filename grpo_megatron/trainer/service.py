"""The commands a trainer executes. Every rank runs every command; rank 0 answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints import distributed, hf_export, hf_import, torch_dist
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.hf_config import computation
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer.checks import logprob_check
from grpo_megatron.trainer.checks.logprob_diff import logprob_gaps
from grpo_megatron.trainer.megatron.platform import peak_memory_bytes
from grpo_megatron.trainer.megatron.policy import build_policy
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, prepare, reduce_stats
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.trainer.steps.teachers import Teachers
from grpo_megatron.trainer.steps.token_update import train_tokens
from grpo_megatron.trainer.train_report import TrainReport
from grpo_megatron.trainer.weight_publisher import WeightPublisher


class TrainerService:
    """The policy, started from a Hugging Face directory, and what the controller may ask of it."""

    def __init__(self, config: RunConfig, model_path: Path):
        self.config = config
        self.model_path = model_path
        temperature = 1.0 if config.kind == "sft" else config.rollout.temperature
        self.policy = build_policy(
            read_config(model_path),
            config.trainer,
            config.optimizer,
            config.routing.router_policy,
            temperature,
        )
        self.publisher = WeightPublisher(self.policy.sharded, config.publish)
        self.load_hf(model_path)
        self.references = References(config)
        if self.references.wanted:
            self.references.read_files(self.policy, self.load_hf)
        self.teachers: Teachers | None = None
        if config.distillation is not None:
            self.teachers = Teachers(config, config.distillation, self._load_model)

    def commands(self) -> dict[str, Callable[..., Any]]:
        own = (
            self.train,
            self.logprob_diff,
            self.train_sft,
            self.compare,
            self.reset_optimizer,
            self.snapshot_reference,
            self.save,
            self.corrupt_files,
            self.load,
            self.export,
        )
        publishing = (self.publisher.open, self.publisher.join, self.publisher.send)
        return {f.__name__: f for f in own} | {f"publish_{f.__name__}": f for f in publishing}

    def load_hf(self, directory: Path) -> None:
        """Read a Hugging Face checkpoint; a converted one, or one of a run, serves as well."""
        self._load_model(directory)
        self.policy.optimizer.reload_model_params()  # its fp32 copies follow

    def _load_model(self, directory: Path) -> None:
        if computation(read_config(directory)) != computation(self.policy.hf):
            raise CheckpointError(
                "its config.json computes something else than the policy's",
                where=str(directory),
                remedy="give the same architecture",
            )
        if torch_dist.is_torch_dist(directory):
            distributed.load_model(directory / "weights", self.policy.chunks)
        else:
            hf_import.import_weights(self.policy.sharded, directory)

    def train(
        self,
        directory: str,
        first_update: int,
        num_updates: int,
        state: dict[str, float],
        replayed: bool = False,
        exact: bool = False,
    ) -> TrainReport:
        """Train all updates of a recorded step (see `Training.run`)."""
        table = _table(directory)
        if self.config.kind == "rl":
            report = Training(
                self.config, self.policy, self.references, table, state, replayed, exact
            ).run(first_update, num_updates)
        else:
            report = train_tokens(
                self.config,
                self.policy,
                table,
                self.config.optimizer,
                first_update,
                num_updates,
                self.teachers,
            )
        interval = self.config.objective.reference_interval
        if interval and self.references.wanted and (table.manifest["step"] + 1) % interval == 0:
            self.references.refresh(self.policy)
        report["metrics"]["trainer/peak_memory_gib"] = peak_memory_bytes() / 2**30
        return report

    def logprob_diff(self, directory: str, to: str, by_layer: bool) -> dict[str, Any]:
        """Log-probs of a recorded step under several routings, written to `to`."""
        table = _table(directory)
        return logprob_gaps(self.config, self.policy, table, Path(to), by_layer=by_layer)

    def snapshot_reference(self) -> None:
        """RL begins: the policy as it is now is its own reference."""
        if self.references.wanted:
            self.references.take(self.policy)

    def train_sft(self, directory: str, first_update: int) -> dict[str, Any]:
        """One supervised optimizer step per update of the recorded step."""
        table = _table(directory)
        settings = self.config.cold_start
        assert settings is not None  # only a cold start asks for it
        return {
            "nll": train_tokens(
                self.config,
                self.policy,
                table,
                settings.optimizer,
                first_update,
                settings.max_steps,
            )["metrics"]["loss/nll"]
        }

    def compare(self, directory: str) -> dict[str, Any]:
        """An engine's samples with this policy, see `canary`: its metrics, `problem`, `remedy`."""
        table = SampleTable(Path(directory), verify=False)
        stats = Stats()
        batch = prepare(self.config.trainer, table, np.arange(len(table)))
        for part, output in zip(batch.microbatches, logprob_pass(self.policy, batch), strict=True):
            if output.numel():
                stats.add(
                    logprob_check.compare(
                        self.config, table, part.table_rows, output[0] - part.rollout_logprobs
                    )
                )
        stats = reduce_stats(stats)
        return {
            "problem": logprob_check.disagreement(self.config, table, stats),
            **stats.result(),
            "remedy": logprob_check.REMEDY,
        }

    def reset_optimizer(self, cold_start: bool) -> None:
        """Drop all moments; take the settings of the cold start or of RL."""
        settings = self.config.optimizer
        if cold_start:
            assert self.config.cold_start is not None
            settings = self.config.cold_start.optimizer
        self.policy.reset_optimizer(settings)

    def save(self, directory: str, state: dict[str, Any]) -> None:
        policy = self.policy
        path = Path(directory)
        create_adam_state(policy.optimizer)  # it has none before its first step
        distributed.save_checkpoint(
            path,
            policy.chunks,
            policy.optimizer,
            {**state, "reference": self.references.save(policy, path)},
            self.model_path,
        )

    def corrupt_files(self, directory: str) -> dict[str, Any]:
        """`files` of a checkpoint and of the reference that it names which are not as written."""
        path = Path(directory)
        files = [f"{path.name}/{name}" for name in distributed.corrupt_files(path)]
        if not files and (name := distributed.read_state(path).get("reference")):
            files = [f"{name}/{file}" for file in distributed.corrupt_files(path.with_name(name))]
        return {"files": files}

    def load(self, directory: str) -> dict[str, Any]:
        policy = self.policy
        path = Path(directory)
        state = distributed.read_state(path)
        if reference := state.pop("reference", None):
            self.references.load(policy, path, reference)
        create_adam_state(policy.optimizer)  # to load into
        distributed.load_checkpoint(path, policy.chunks, policy.optimizer)
        if self.references.wanted and not reference:  # the objective is another one since
            self.references.take(policy)
        return state

    def export(self, directory: str) -> dict[str, Any]:
        """Write a Hugging Face checkpoint and read it back (see `export_model`)."""
        return {
            "bytes": hf_export.export_model(self.policy.sharded, Path(directory), self.model_path)
        }


def _table(directory: str) -> SampleTable:
    """A recorded step; one rank verifies it for all."""
    return SampleTable(Path(directory), verify=dist.get_rank() == 0)
