"""The GPUs of this machine, told without torch, and what a run that needs more is told."""

import os
import re
from pathlib import Path

from grpo_megatron import pretended_cuda
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import SetupError

_SIGNS = (
    Path("/proc/driver/nvidia/version"),
    Path("/sys/module/nvidia/version"),
    Path("/dev/nvidiactl"),
    Path("/dev/nvidia0"),
    Path("/dev/dxg"),  # of Windows, for its Linux
)
"""Each is there wherever NVIDIA's driver is, inside of some containers only one."""
_DEVICES = Path("/dev")
_OF_A_GPU = re.compile(r"nvidia\d+")


def has_gpu_driver() -> bool:
    """Whether the driver of a GPU is loaded on this machine."""
    return any(sign.exists() for sign in _SIGNS)


def num_gpus(devices: Path = _DEVICES) -> int | None:
    """Return the GPUs that processes of this machine may use, None where that cannot be told: its
    driver has no file for each, and `CUDA_VISIBLE_DEVICES` names none."""
    counts = []
    files = [file for file in devices.glob("nvidia*") if _OF_A_GPU.fullmatch(file.name)]
    if files:
        counts.append(len(files))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        counts.append(len([name for name in named.split(",") if name.strip()]))
    return min(counts, default=None)


def refuse_absent_gpus(config: RunConfig) -> None:
    """SetupError where a recipe for GPUs is to run on this machine, which has none, or fewer."""
    gpus = config.placement.gpus_per_node
    if gpus == 0 or pretended_cuda.is_wanted():
        return
    if has_gpu_driver():
        _refuse_fewer_gpus(config, num_gpus())
        return
    raise SetupError(
        f"placement.gpus_per_node = {gpus}, and this machine has no GPU (no NVIDIA driver)",
        where="this machine",
        remedy="submit it to a cluster, rehearse it here (grpo-megatron rehearse), or set "
        "placement.gpus_per_node=0 to run it on the CPU",
    )


def _refuse_fewer_gpus(config: RunConfig, there: int | None) -> None:
    """SetupError where there are fewer GPUs than a node of the recipe has, or than its trainer has
    ranks: all of them run here."""
    wanted = max(config.placement.gpus_per_node, config.trainer.num_ranks)
    if there is None or wanted <= there:
        return
    raise SetupError(
        f"the recipe asks for {wanted} GPUs (placement.gpus_per_node = "
        f"{config.placement.gpus_per_node}, {config.trainer.num_ranks} ranks of the trainer), and "
        f"processes of this machine may use {there}",
        where="this machine",
        remedy="submit it to a cluster, or ask for fewer (grpo-megatron plan --search "
        f"1x{max(there, 1)} names layouts); CUDA_VISIBLE_DEVICES may hide some",
    )
