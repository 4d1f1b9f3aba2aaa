"""Process groups of this rank."""

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer.megatron.platform import BACKEND, bind_device, device


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Position of this process, from the variables that torchrun and Slurm set."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variables; without them this process is the only one."""
        env = os.environ
        rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
        return cls(
            rank,
            int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", rank))),
            int(env.get("WORLD_SIZE", env.get("SLURM_NTASKS", 1))),
        )


def initialize(layout: TrainerConfig, info: RankInfo, store: Store | None = None) -> None:
    """Join the world, at `store` or as the environment says, and build Megatron's groups anew.

    Claims this rank's device. Waits of collectives end after `layout.command_timeout_s`."""
    bind_device(info.local_rank, layout.num_threads)
    if dist.is_initialized():
        shutdown()
    timeout = timedelta(seconds=layout.command_timeout_s)
    dist.init_process_group(
        BACKEND, store=store, rank=info.rank, timeout=timeout, world_size=info.world_size
    )
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        layout.virtual_pipeline_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
    )


def shutdown() -> None:
    """Leave all groups. Forgetting them is not enough: every gloo group keeps two threads."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    gc.collect()  # models of an earlier layout hold groups
    dist.destroy_process_group()


def is_first_with_samples() -> bool:
    """Say whether this rank is the first of those of its pipeline stage that have the same samples:
    tensor-parallel and context-parallel ranks."""
    is_first_tensor_rank = int(parallel_state.get_tensor_model_parallel_rank()) == 0
    return is_first_tensor_rank and int(parallel_state.get_context_parallel_rank()) == 0


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks; the result, of the same shape, is on the host. Collective."""
    total = tensor.to(device(), copy=True)
    dist.all_reduce(total)
    return total.cpu()


def seed_everything(seed: int) -> None:
    """Seed every generator: the same in data-parallel replicas, different where tensor ranks must
    differ."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
