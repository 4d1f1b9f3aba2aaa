"""What there is on this machine, as far as it decides which parts of `prove` are possible."""

import os
from typing import Literal

import msgspec

from grpo_megatron import pretended_cuda

Device = Literal["cuda", "pretended", "none"]
PRETENDING = {**pretended_cuda.environment(), "CUDA_VISIBLE_DEVICES": ""}
"""Variables of processes that pretend to have a GPU; real ones would be in the way."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The machine, as `prove.probe` found it in a process of its own."""

    device: Device
    """pretended: a CPU on which tensors say that they are on a GPU."""
    num_gpus: int = 0
    gpu_name: str = ""
    memory_bytes: int = 0
    """Of one GPU."""
    free_bytes: int = 0
    """Of the GPU with the least."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, (9, 0) is an H100's."""
    transformer_engine: str = ""
    """Its version, where it can be imported and used; else empty."""
    why_no_transformer_engine: str = ""
    cpu_engine: bool = False
    """Whether the vLLM that is installed is its CPU build."""
    versions: dict[str, str] = {}
    """Of packages and libraries, by name; "" where one is missing."""
    problem: str = ""
    """What the probe died of."""

    @property
    def is_pretended(self) -> bool:
        """Whether figures mean nothing."""
        return self.device == "pretended"


def num_nodes() -> int:
    """Count the nodes of the Slurm job in which this process runs; 1 outside of a job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
