"""Several epochs over one recorded batch, on real ranks; and the same steps taken one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.batching.mask_file import read_masks, write_masks
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.steps.microbatch import UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, prepare, train_step
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from tests.trainer.trainer_ranks import Setup

FIRST_UPDATE = 3
NUM_UPDATES = 20


def recipe(setup: Setup, epochs: int, objective: dict[str, Any]) -> RunConfig:
    """A recipe of so many epochs, with a learning rate that falls from update to update."""
    config = setup.config(**objective)
    falling = config.optimizer.model_copy(update={"schedule": "linear"})
    batch = config.batch.model_copy(update={"epochs": epochs})
    return config.model_copy(update={"optimizer": falling, "batch": batch})


def train_epochs(
    model: str,
    samples: str,
    layout: dict[str, Any],
    *,
    epochs: int,
    objective: dict[str, Any],
    replayed: bool = False,
    unmask_epoch: int | None = None,
) -> dict[str, Any]:
    """The report of all epochs and the masks that it left; `unmask_epoch` clears the recorded masks
    of one epoch before they are replayed."""
    setup = Setup(model, layout)
    config = recipe(setup, epochs, objective)
    table = SampleTable(Path(samples))
    if unmask_epoch is not None:
        masks = read_masks(table.directory, table.completion_lengths)
        for name, mask in masks.items():
            if name.endswith(f"@epoch_{unmask_epoch}"):
                mask[:] = False
        rows = torch.arange(len(table)).numpy()
        write_masks(table.directory, 0, 1, [(rows, masks)])
    training = Training(config, setup.policy, References(config), table, {}, replayed=replayed)
    report = training.run(FIRST_UPDATE, NUM_UPDATES)
    found = read_masks(table.directory, table.completion_lengths)
    masked = {name: int(mask.sum()) for name, mask in found.items()}
    return asdict(report) | {"masked": masked, "tensors": setup.gather(setup.shards)}


def train_one_by_one(
    model: str, samples: str, layout: dict[str, Any], *, epochs: int, objective: dict[str, Any]
) -> dict[str, Any]:
    """The same optimizer steps without `Training`: old log-probs once, then all updates in turn."""
    setup = Setup(model, layout)
    config = recipe(setup, epochs, objective)
    table = SampleTable(Path(samples))
    chosen = objective_of(config, {})
    batch = sample_batch(config, table)
    advantages = advantages_of(chosen, batch)
    updates = []
    for number in range(int(table.update.max()) + 1):
        rows = (table.update == number).nonzero()[0]
        update = prepare(setup.layout, table, rows)
        old = [output[0] for output in logprob_pass(setup.policy, update)]
        updates.append((update, old))
    losses = []
    rates = []
    for _ in range(epochs):
        for update, old in updates:
            constants = loss_constants(
                chosen, batch, advantages, update.episodes, config.rollout.max_new_tokens
            )
            rate = config.optimizer.rate(FIRST_UPDATE + len(losses), NUM_UPDATES)
            setup.policy.set_learning_rate(rate)
            stats = train_step(setup.policy, update, _loss(update, old, constants, chosen))
            losses.append(stats.result()["loss/value"])
            rates.append(rate)
    return {"losses": losses, "rates": rates, "tensors": setup.gather(setup.shards)}


def _loss(update: UpdateBatch, old: list[torch.Tensor], constants: Any, objective: Any) -> Any:
    def loss(microbatch: Any, output: torch.Tensor) -> Any:
        logprobs, entropies = output.unbind(0)
        return policy_loss(
            objective,
            constants.loss_batch(
                torch.from_numpy(microbatch.episodes),
                logprobs=logprobs,
                old_logprobs=old[microbatch.index],
                rollout_logprobs=microbatch.rollout_logprobs,
                entropies=entropies,
            ),
        )

    return loss
