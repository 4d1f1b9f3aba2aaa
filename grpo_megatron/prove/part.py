"""What a part of `prove` is, and what its function is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.evidence import Recorder

Need = Callable[[Conditions], str]
"""Says why a part is not possible on a machine; empty where it is."""


@dataclass(frozen=True)
class Job:
    """What a part works with, in the process that is its own."""

    folder: Path
    """For everything that it writes; exists, and is empty but for the log."""
    conditions: Conditions
    recorder: Recorder


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that `prove` shows."""

    name: str
    shows: str
    run: Callable[[Job], None]
    """Called in a process of its own. What it raises fails the part."""
    needs: tuple[Need, ...] = ()
    usual_s: float = 60.0
    """Seconds without which it is not started."""
    limit_s: float = 180.0
    """Seconds after which it is ended, and has failed."""

    @property
    def function(self) -> str:
        """Where `run` is defined: `module:name`, for another process to import."""
        return f"{self.run.__module__}:{self.run.__qualname__}"

    def why_not(self, conditions: Conditions) -> str:
        """Say why it is not possible on this machine; empty where it is."""
        reasons = [need(conditions) for need in self.needs]
        return "; ".join(reason for reason in reasons if reason)


def a_gpu(conditions: Conditions) -> str:
    """Need a GPU, or one that pretends."""
    if conditions.device == "none":
        return "torch sees no GPU"
    return ""


def two_gpus(conditions: Conditions) -> str:
    """Need two GPUs: NCCL takes no two ranks on one."""
    if conditions.num_gpus < 2:
        return f"it needs 2 GPUs, and there are {conditions.num_gpus}"
    return ""


def transformer_engine(conditions: Conditions) -> str:
    """Need Transformer Engine."""
    return conditions.why_no_transformer_engine


def fp8_in_blocks(conditions: Conditions) -> str:
    """Need a GPU that multiplies FP8 in blocks: Hopper or newer."""
    if conditions.device != "none" and conditions.capability < (9, 0):
        major, minor = conditions.capability
        return f"FP8 in blocks needs compute capability 9.0, and this is {major}.{minor}"
    return ""
