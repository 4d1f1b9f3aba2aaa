"""Part `nodes`: the layouts once more, with ranks on different nodes of a Slurm job."""

import shutil

from grpo_megatron.prove.conditions import Conditions, num_nodes
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.parts.layouts import compare_layouts
from grpo_megatron.prove.ranks import WITHOUT_TF32, on_nodes


def several_nodes(conditions: Conditions) -> str:
    """Need a Slurm job of two nodes or more (slurm/prove.sbatch)."""
    if num_nodes() < 2:
        return "it needs a Slurm job of two nodes: sbatch slurm/prove.sbatch"
    if shutil.which("srun") is None:
        return "it starts ranks with srun, which is not there (in a container?)"
    return ""


def run(job: Job) -> None:
    """Train on one rank here, then at each layout with one rank on each of two nodes."""
    job.recorder.note("One rank on each of two nodes: all that they tell each other takes the net.")
    compare_layouts(job, on_nodes(2, 1, WITHOUT_TF32))
