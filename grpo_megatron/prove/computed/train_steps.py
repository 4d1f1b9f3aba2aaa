"""Optimizer steps on a recorded step, with everything that is compared between two devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.prove.computed.recipe import recipe_of
from grpo_megatron.prove.requests import TrainedSteps, TrainSteps
from grpo_megatron.trainer.megatron.platform import peak_memory_bytes
from grpo_megatron.trainer.megatron.policy import Policy, build_policy, describe_kernels
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.routing.router_replay import RoutingPass
from grpo_megatron.trainer.steps.optimizer_step import gather_tokens, logprob_pass, prepare
from grpo_megatron.trainer.steps.recorded_batch import sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.gather import Shard, ShardedModel

_NEVER_CLIPPED = 1e9
"""A bound that no gradient reaches: what is compared is the gradient before clipping."""


def train_steps(request: TrainSteps, layout: TrainerConfig) -> TrainedSteps:
    """Compute log-probs, then take all optimizer steps of the recorded step. Collective."""
    if request.gradients is not None:
        layout = layout.model_copy(update={"distributed_optimizer": False})
    config = recipe_of(layout, replay="r3" if request.replays_routes else "none")
    optimizer = config.optimizer
    if request.gradients is not None:
        optimizer = optimizer.model_copy(update={"clip_grad": _NEVER_CLIPPED})
    policy = build_policy(read_config(request.model), layout, optimizer)
    import_weights(policy.sharded, request.model)
    policy.optimizer.reload_model_params()
    table = SampleTable(request.samples, verify=dist.get_rank() == 0)
    logprobs = _logprobs(config, policy, table)
    training = Training(config, policy, References(config), table, {})
    report = training.run(0, training.num_planned_updates)
    if request.gradients is not None:
        _write_gradients(policy, request.gradients)
    return TrainedSteps(
        losses=report.losses,
        grad_norms=report.grad_norms,
        logprobs=logprobs.tolist(),
        kernels=[str(kernel) for kernel in describe_kernels(policy, layout)],
        peak_bytes=peak_memory_bytes(),
    )


def _logprobs(config: RunConfig, policy: Policy, table: SampleTable) -> torch.Tensor:
    """Return log-probs of all policy tokens at the current weights, fp32 [n] in the table's
    order."""
    batch = prepare(config.trainer, table, np.arange(len(table)))
    routing = None
    if config.routing.replay == "r3":
        routes = RouteSource(config, policy.replay, table).from_store(batch)
        if routes is not None:
            routing = RoutingPass(replayed=routes)
    outputs = logprob_pass(policy, batch, routing)
    values = [output[0] for output in outputs]
    return gather_tokens(sample_batch(config, table), [batch], [values])


def _write_gradients(policy: Policy, path: Path) -> None:
    """Write the gradients of the last step on rank 0, fp32 by Hugging Face names. Collective."""
    gradients: list[Shard] = []
    for shard in policy.sharded.shards:
        gradient = getattr(shard.tensor, "main_grad", None)
        if gradient is not None:  # a selection bias has none
            gradients.append(replace(shard, tensor=gradient))
    model = ShardedModel(policy.sharded.map, gradients)
    found = {}
    for name, tensor in model.stream(model.entries, [0] * len(model.entries)):
        found[name] = tensor.float().cpu().contiguous().clone()
    if dist.get_rank() == 0:
        save_file(found, path)
