"""Recipes as tasks of a NeMo-Run experiment (extra `launch`, in an environment without vLLM).

On a SlurmExecutor the task is the supervisor, on the job's first node; a container's image must
have srun. On other executors a run is on one machine. No checkpoint before the time limit."""

import shlex
from collections.abc import Sequence

import nemo_run as run

from grpo_megatron.plan.resolve import resolve


def add_stages(
    experiment: run.Experiment,
    recipes: Sequence[str],
    executor: run.Executor,
    overrides: Sequence[str] = (),
) -> None:
    """Each run after the one before."""
    before: list[str] = []
    for recipe in recipes:
        config = resolve(recipe, overrides).config
        where = executor.clone()
        flags = ["--resume-if-exists"]
        if isinstance(where, run.SlurmExecutor):
            flags.append("--in-job")
            where.nodes = config.placement.num_nodes
            where.ntasks_per_node = 1
            where.gpus_per_node = config.placement.gpus_per_node or None
            where.srun_args = [*(where.srun_args or []), "--nodes=1", "--ntasks=1", "--overlap"]
        command = ["grpo-megatron", "train", recipe, *flags, *overrides]
        before = [
            experiment.add(
                run.Script(inline=shlex.join(command)),
                executor=where,
                name=config.name,
                dependencies=before or None,
            )
        ]
