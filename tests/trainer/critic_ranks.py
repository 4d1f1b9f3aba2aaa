"""What ranks do with a critic beside the policy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.critic import CriticConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.requests import (
    LoadCheckpoint,
    SaveCheckpoint,
    SnapshotReference,
    Train,
    TrainReport,
)
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.answer_scores import answer_scores
from grpo_megatron.trainer.steps.critic import Critic, build_critic
from grpo_megatron.trainer.steps.recorded_batch import sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from tests.integration import trainer_side
from tests.trainer.trainer_ranks import OPTIMIZER, Setup, _earlier


class CriticSetup(Setup):
    """A policy and its critic at one layout, of a recipe with PPO."""

    def __init__(
        self,
        model: str,
        layout: dict[str, Any],
        critic: dict[str, Any] | None = None,
        **objective: Any,
    ):
        super().__init__(model, layout)
        slow = OPTIMIZER.model_copy(update={"lr": 1e-4})  # Adam amplifies rounding
        settings = CriticConfig(**{"optimizer": slow, **(critic or {})})
        config = self.config(**{"preset": "ppo", **objective})
        self.recipe = config.model_copy(update={"critic": settings, "optimizer": slow})
        self.critic: Critic = build_critic(self.recipe, settings, self.policy)
        _earlier.append(self.critic.model)

    def train(self, samples: str) -> tuple[Training, TrainReport]:
        """Take all updates of a step."""
        training = Training(
            self.recipe,
            self.policy,
            References(self.recipe),
            SampleTable(Path(samples)),
            {},
            critic=self.critic,
        )
        return training, training.run(0, 3)


def train_with_critic(
    model: str,
    samples: str,
    layout: dict[str, Any],
    *,
    gradients: bool = False,
    critic: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All updates of a step: values, metrics, and both models' weights after them; or, with
    `gradients`, their averaged gradients of the last update before clipping."""
    if gradients:
        layout = {**layout, "distributed_optimizer": False}
    setup = CriticSetup(model, layout, critic)
    training, report = setup.train(samples)
    norms = {
        "policy": report.grad_norms[-1] if report.grad_norms else 0.0,
        "critic": report.metrics["critic/grad_norm"],
    }
    parts = {"policy": setup.policy.sharded.shards, "critic": setup.critic.model.sharded.shards}
    tensors = {}
    for name, shards in parts.items():
        if gradients:
            scale = max(norms[name] / OPTIMIZER.clip_grad, 1.0)
            shards = [replace(one, tensor=one.tensor.main_grad * scale) for one in shards]
        tensors[name] = setup.gather(shards)
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "updates": report.updates,
        "metrics": without_times(report),
        "values": training.batch.tokens["values"].numpy(),
        "returns": training.value_targets.returns.numpy(),
        "rewards": training.batch.rewards.numpy(),
        "counts": training.batch.token_counts.numpy(),
        "tensors": tensors,
    }


def without_times(report: TrainReport) -> dict[str, float]:
    """Metrics that do not depend on the machine."""
    return {
        name: value
        for name, value in report.metrics.items()
        if name not in ("time/critic_s", "trainer/peak_memory_gib")
    }


def values_after_another_last_token(model: str, samples: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of all policy tokens, and those where each sample's last token is another one."""
    setup = CriticSetup(model, {"share_prefixes": False})  # a sample's tokens are neighbours
    found = []
    everything = sample_batch(setup.recipe, SampleTable(Path(samples)))
    for shift in (0, 1):
        batch = setup.batch(samples)
        for microbatch in batch.microbatches:
            is_last = torch.diff(microbatch.sample, append=microbatch.sample.new_tensor([-1])) != 0
            places = microbatch.predicting[is_last] + 1
            microbatch.tokens[0, places] = (microbatch.tokens[0, places] + shift) % 90
        setup.critic.compute_values([batch])
        values = [microbatch.values for microbatch in batch.microbatches]
        found.append(optimizer_step.gather_tokens(everything, [batch], [values]).numpy())
    return found[0], found[1]


def learns_the_reward(model: str, samples: str, steps: int) -> list[float]:
    """Errors of the values over steps in which the critic alone is trained."""
    critic = {"warmup_steps": 10_000, "optimizer": {"lr": 3e-3}, "value_clip": None}
    setup = CriticSetup(model, {}, critic, gae_lambda=1.0)
    before = [one.tensor.detach().clone() for one in setup.shards]
    errors = []
    for _ in range(steps):
        _, report = setup.train(samples)
        errors.append(report.metrics["critic/error"])
    for one, old in zip(setup.shards, before, strict=True):
        assert torch.equal(one.tensor, old)
    return errors


def begins_with_a_reward_model(
    model: str, scored_by: str, samples: str, layout: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Of all policy tokens, what a reward model says and the first values of a critic that begins
    with it; of all samples, the reward model's scores. Over all ranks."""
    scorer = Setup(scored_by, layout, num_scalars=1)
    table = SampleTable(Path(samples))
    config = scorer.config().model_copy(update={"kind": "reward_model"})
    scores = answer_scores(config, scorer.policy, table)
    batch = scorer.batch(samples)
    scalars = [output[0] for output in optimizer_step.logprob_pass(scorer.policy, batch)]
    everything = sample_batch(config, table)
    of_tokens = optimizer_step.gather_tokens(everything, [batch], [scalars])

    setup = CriticSetup(model, layout, {"path": scored_by})
    setup.critic.begin(setup.policy)
    batch = setup.batch(samples)
    setup.critic.compute_values([batch])
    values = [microbatch.values for microbatch in batch.microbatches]
    return {
        "scores": scores,
        "scalars": of_tokens.numpy(),
        "values": optimizer_step.gather_tokens(everything, [batch], [values]).numpy(),
        "counts": everything.token_counts.numpy(),
    }


def first_weights(
    model: str, critic: dict[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights of the policy and of the critic when RL begins."""
    setup = CriticSetup(model, {}, critic)
    setup.critic.begin(setup.policy)
    return setup.gather(setup.shards), setup.gather(setup.critic.model.sharded.shards)


def refusal_to_begin(model: str, path: str) -> str:
    """What a critic says of a checkpoint that it is to begin with."""
    setup = CriticSetup(model, {}, {"path": path})
    try:
        setup.critic.begin(setup.policy)
    except CheckpointError as error:
        return str(error)
    return ""


def first_optimizer_step(model: str, samples: str, path: str) -> float:
    """Largest change of a weight in one optimizer step of a critic in bfloat16 that begins with
    `path`: with other fp32 copies than its weights, it would leap back to where it was made."""
    settings = {"path": path, "optimizer": {"lr": 1e-3}}
    setup = CriticSetup(model, {"precision": "bfloat16"}, settings)
    setup.critic.begin(setup.policy)
    before = [one.tensor.detach().clone() for one in setup.critic.model.sharded.shards]
    setup.train(samples)
    changes = []
    for one, old in zip(setup.critic.model.sharded.shards, before, strict=True):
        changes.append(float((one.tensor.float() - old.float()).abs().max()))
    return max(changes)


def resume_with_critic(
    model: str, samples: str, layout: dict[str, Any], root: str, path: str | None = None
) -> dict[str, Any]:
    """Train, save, train on; then load in a fresh trainer, and train on. path: what the critic
    begins with; it is gone before the resume."""
    config = RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "optimizer": {"lr": 1e-3},
            "trainer": {"precision": "float32", "num_threads": 1, **layout},
            "objective": {"preset": "ppo"},
            "critic": {"optimizer": {"lr": 1e-3}, "path": path},
            "domains": [
                {"name": name, "source": "file", "path": "x", "rewards": [{"function": "a:b"}]}
                for name in ("even", "odd")
            ],
        }
    )
    training = Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    directory = Path(root) / "step_000002"

    def state_of_both() -> list[torch.Tensor]:
        service = trainer_side._service
        tensors = []
        for trained in (service.policy, service.critic.model):
            for model in trained.models:
                tensors += [parameter.detach().clone() for parameter in model.parameters()]
        return tensors

    trainer_side.start(config, model)
    trainer_side.execute(SnapshotReference())
    for _ in range(2):
        trainer_side.execute(training)
    trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": 2}))
    expected = without_times(trainer_side.execute(training))
    expected_tensors = state_of_both()
    if path is not None and dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    trainer_side.start(config, model)
    loaded = trainer_side.execute(LoadCheckpoint(directory))
    found = without_times(trainer_side.execute(training))
    tensors = state_of_both()
    pairs = zip(tensors, expected_tensors, strict=True)
    return {
        "loaded": loaded,
        "found": found,
        "expected": expected,
        "is_equal": all(torch.equal(one, other) for one, other in pairs),
        "folders": sorted(path.name for path in directory.iterdir() if path.is_dir()),
    }


def load_without_critic(model: str, root: str) -> list[str]:
    """What a trainer with a critic says of checkpoints without one, of step 0 and of step 1."""
    config = CriticSetup(model, {}).recipe
    directory = Path(root) / "step_000000"
    objective = config.objective.model_copy(update={"advantage": "group"})
    without = config.model_copy(update={"critic": None, "objective": objective})
    said = []
    for step in (0, 1):
        trainer_side.start(without, model)
        trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": step}))
        trainer_side.start(config, model)
        try:
            trainer_side.execute(LoadCheckpoint(directory))
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said
