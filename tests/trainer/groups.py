"""Process groups of one case after the other in the same processes."""

from __future__ import annotations

import gc

import torch.distributed as dist

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer import platform
from grpo_megatron.trainer.distributed import RankInfo, initialize

# isort: split
from megatron.core import parallel_state

_sizes: tuple = ()


def join(layout: TrainerConfig) -> None:
    """Build the groups of `layout`, unless they are those of the case before.

    Every gloo group has threads of its own: old groups are taken down, or some tens of cases
    would leave thousands of threads.
    """
    global _sizes
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size,
             layout.virtual_pipeline_parallel_size, layout.context_parallel_size,
             layout.expert_parallel_size, layout.expert_tensor_parallel_size)
    if sizes == _sizes:
        platform.bind_device(RankInfo.from_environment().local_rank, layout.num_threads)
        return
    if _sizes:
        parallel_state.destroy_model_parallel()
        gc.collect()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    initialize(layout, RankInfo.from_environment())
    _sizes = sizes
