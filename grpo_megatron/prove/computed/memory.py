"""The highest memory of an optimizer step."""

import resource

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron import pretended_cuda
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.prove.computed.recipe import recipe_of
from grpo_megatron.prove.requests import MeasuredMemory, MeasureMemory
from grpo_megatron.trainer.megatron import platform
from grpo_megatron.trainer.megatron.policy import build_policy
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.gather import all_gathered


def measure_memory(request: MeasureMemory, layout: TrainerConfig) -> MeasuredMemory:
    """Train the recorded step twice; the second time Adam's moments are there from the start.

    Collective."""
    config = recipe_of(layout)
    policy = build_policy(request.hf, layout, config.optimizer)
    table = SampleTable(request.samples, verify=dist.get_rank() == 0)
    after_build = peak_bytes()
    Training(config, policy, References(config), table, {}).run(0, 2)
    after_first_step = peak_bytes()
    if platform.HAS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    Training(config, policy, References(config), table, {}).run(1, 2)
    found = (after_build, after_first_step, peak_bytes())
    fullest = np.max(all_gathered(found), axis=0)
    return MeasuredMemory(
        after_build=int(fullest[0]), after_first_step=int(fullest[1]), peak=int(fullest[2])
    )


def peak_bytes() -> int:
    """Return the highest memory of the device so far; of a device that only pretends, of the
    process."""
    if pretended_cuda.is_wanted():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return platform.peak_memory_bytes()
