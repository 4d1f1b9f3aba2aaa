"""Sizes of the parts: for a GPU, or for a CPU on which a GPU is pretended."""

from dataclasses import dataclass

from grpo_megatron.prove import workload
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.workload import Lengths, Size


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    model: Size
    lengths: Lengths
    """Of the samples that are compared."""
    num_groups: int
    """Of a compared step; each of its optimizer steps trains a third."""
    group_size: int


ON_GPU = Sizes(workload.WIDE, Lengths(prompt=32, shortest=32, longest=256), 12, 4)
ON_CPU = Sizes(workload.NARROW, Lengths(prompt=5, shortest=4, longest=16), 6, 2)
NUM_UPDATES = 3
"""Optimizer steps that are compared."""


def sizes_for(conditions: Conditions) -> Sizes:
    """Choose sizes that keep a GPU busy, or a CPU not for long."""
    if conditions.device == "cuda":
        return ON_GPU
    return ON_CPU
