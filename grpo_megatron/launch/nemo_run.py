"""Recipes as tasks of a NeMo-Run experiment (extra `launch`, in an environment without vLLM).

    with run.Experiment("stages") as experiment:
        add_stages(experiment, ["math.toml", "code.toml"], executor)
        experiment.run()        # or dryrun()

On a SlurmExecutor the task is the supervisor, one process on the job's first node, which starts the
run's roles as steps; with a container, the image must have srun. On every other executor (local,
Docker, Kubernetes) a run is on one machine. NeMo-Run's own job makes no checkpoint before its time
limit: `grpo-megatron submit` does.
"""

import shlex
from collections.abc import Sequence

import nemo_run as run

from grpo_megatron.plan.resolve import resolve


def task(recipe: str, overrides: Sequence[str] = (), *, in_job: bool = False) -> run.Script:
    """The run of a recipe; one that exists is continued.

    Raises:
        ConfigError: The recipe is not valid.
    """
    resolve(recipe, overrides)
    flags = ["--resume-if-exists", *(["--in-job"] if in_job else [])]
    return run.Script(inline=shlex.join(["grpo-megatron", "train", recipe, *flags, *overrides]))


def on_first_node(executor: run.SlurmExecutor, recipe: str,
                  overrides: Sequence[str] = ()) -> run.SlurmExecutor:
    """The executor with the recipe's nodes, starting one process on the first of them."""
    placement = resolve(recipe, overrides).config.placement
    executor = executor.clone()
    executor.nodes, executor.ntasks_per_node = placement.num_nodes, 1
    if placement.gpus_per_node:
        executor.gpus_per_node = placement.gpus_per_node
    executor.srun_args = [*(executor.srun_args or []), "--nodes=1", "--ntasks=1", "--overlap"]
    return executor


def add_stages(experiment: run.Experiment, recipes: Sequence[str], executor: run.Executor,
               overrides: Sequence[str] = ()) -> None:
    """Add recipes to an experiment, each after the one before."""
    before: list[str] = []
    for recipe in recipes:
        is_slurm = isinstance(executor, run.SlurmExecutor)
        where = on_first_node(executor, recipe, overrides) if is_slurm else executor.clone()
        name = resolve(recipe, overrides).config.name
        before = [experiment.add(task(recipe, overrides, in_job=is_slurm), executor=where,
                                 name=name, dependencies=before or None)]
