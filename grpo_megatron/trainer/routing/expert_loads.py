"""How many tokens of each sample the experts of every rank will get, by the engine's routes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.batching.expert_balance import ExpertLoads
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.routing.shape import RouteShape, RouteStatus
from grpo_megatron.trainer.megatron.platform import device


def expert_loads(config: RunConfig, table: SampleTable, shape: RouteShape) -> ExpertLoads | None:
    """Count the routes of a recorded step, of all its N samples; each rank reads a share of them.

    None where no routes of `shape` are replayed, or every rank has all experts. Collective."""
    layout = config.trainer
    num_owners = layout.expert_parallel_size
    is_known = config.routing.replay == "r3" and shape in table.route_shapes
    if not (config.routing.level_experts and is_known) or num_owners == 1:
        return None
    counts = torch.zeros(2, len(table), len(shape.layers), num_owners)
    for row in range(dist.get_rank(), len(table), dist.get_world_size()):
        counts[:, row] = torch.from_numpy(count_choices(table, row, shape, num_owners))
    on_device = counts.to(device())
    dist.all_reduce(on_device)
    prompts, completions = on_device.double().cpu().numpy()
    return ExpertLoads(prompts, completions, _ranks_per_group(layout))


def count_choices(table: SampleTable, row: int, shape: RouteShape, num_owners: int) -> np.ndarray:
    """Count a sample's choices by the rank that has the expert, of tokens with a usable route.

    Returns float32 [2, L, num_owners]: of what other samples may share, and of the others. That is
    the prompt and the completion; of a sequence that begins as an earlier one of its episode, what
    it shares with that and the rest."""
    num_layers = len(shape.layers)
    ids, status = table.routes(row, shape.layers, shape)
    owner = ids.astype(np.int64) // (shape.num_experts // num_owners)
    owner = np.minimum(owner, num_owners - 1)  # of an expert that does not exist, not counted below
    place = owner + num_owners * np.arange(num_layers)[:, None, None]
    is_usable = np.broadcast_to((status == RouteStatus.OK)[:, :, None], ids.shape)
    num_prompt = int(table.prompt_lengths[row])
    fork = table.fork(row)
    if fork is not None and fork.num_tokens:
        num_prompt = fork.num_tokens
    counts = np.zeros((2, num_layers, num_owners), np.float32)
    for part, tokens in enumerate((slice(0, num_prompt), slice(num_prompt, None))):
        counted = place[:, tokens][is_usable[:, tokens]]
        found = np.bincount(counted, minlength=num_layers * num_owners)
        counts[part] = found.reshape(num_layers, num_owners)
    return counts


def _ranks_per_group(layout: TrainerConfig) -> int:
    """Data-parallel ranks whose tokens go to one group of expert-parallel ranks."""
    of_experts = layout.etp * layout.expert_parallel_size
    of_attention = layout.tensor_parallel_size * layout.context_parallel_size
    return max(of_experts // of_attention, 1)
