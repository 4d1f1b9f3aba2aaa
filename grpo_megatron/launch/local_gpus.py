"""Whether this machine has a GPU, told without torch, and what a run that needs one is told."""

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


def has_gpu_driver() -> bool:
    """Whether the driver of a GPU is loaded on this machine."""
    return any(sign.exists() for sign in _SIGNS)


def refuse_absent_gpus(config: RunConfig) -> None:
    """SetupError where a recipe for GPUs is to run on this machine, which has none."""
    gpus = config.placement.gpus_per_node
    if gpus == 0 or has_gpu_driver() or pretended_cuda.is_wanted():
        return
    raise SetupError(
        f"placement.gpus_per_node = {gpus}, and this machine has no GPU (no NVIDIA driver)",
        where="this machine",
        remedy="submit it to a cluster, rehearse it here (grpo-megatron rehearse), or set "
        "placement.gpus_per_node=0 to run it on the CPU",
    )
