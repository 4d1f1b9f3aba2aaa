"""`train`, `resume`; `replay`, `mismatch`: recorded steps again, at any layout."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(
    metavar="KEY=VALUE", show_default=False,
    help="Settings on top of the recipe, for example trainer.num_ranks=4.")]

Run = Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.")]
RecordedStep = Annotated[str, typer.Argument(
    metavar="RUN[@STEP]", help="Run directory and recorded step, for example runs/demo@200; "
                               "default: the newest that can be computed again.")]
InJob = Annotated[bool, typer.Option(
    "--in-job", help="Start the processes as steps of the Slurm job around this one.")]


def train(
    recipe: Annotated[str, typer.Argument(
        help="Path of a recipe, or the name of a shipped one (demo/gspo-moe-cpu).")],
    overrides: Overrides = None,
    resume_if_exists: Annotated[bool, typer.Option(
        "--resume-if-exists", help="Continue the run of this name if there is one.")] = False,
    overwrite: Annotated[bool, typer.Option(
        "--overwrite", help="Delete the run of this name and start anew.")] = False,
    in_job: InJob = False,
) -> None:
    """Train from a recipe. The run directory is runs_dir/name."""
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.plan.resolve import resolve

    if overwrite and resume_if_exists:
        raise ConfigError("--overwrite and --resume-if-exists exclude each other",
                          where="command line", remedy="choose one of them")
    flags = overrides or []
    resolved = resolve(recipe, flags)
    from grpo_megatron.launch import local

    if resume_if_exists and _is_run(resolved.run_path):
        raise typer.Exit(local.resume(resolved.run_path, flags, in_job=in_job))
    raise typer.Exit(local.train(resolved, overwrite=overwrite, in_job=in_job))


def resume(
    run: Run,
    overrides: Overrides = None,
    in_job: InJob = False,
    here: Annotated[bool, typer.Option(
        "--here", help="On this machine, also if the run was submitted as a job.")] = False,
) -> None:
    """Continue a run from its newest checkpoint; one that was submitted, as a job again."""
    check_run(run)
    from grpo_megatron.launch import local, slurm
    from grpo_megatron.rundir import RunDir

    if (RunDir(run).slurm / "train.sbatch").exists() and not in_job and not here:
        typer.echo(slurm.resume(run, overrides or []))
        return
    raise typer.Exit(local.resume(run, overrides or [], in_job=in_job))


def replay(target: RecordedStep, overrides: Overrides = None) -> None:
    """Train a recorded step again from its checkpoint and compare with what was recorded.

    Follows the recorded samples, routes, clip and mask decisions, at the layout that overrides
    ask for. Exit code 7 if loss or gradient norm differ by more than rounding explains."""
    from grpo_megatron.launch.replay import replay_step

    for line in replay_step(*_run_and_step(target), overrides or []):
        typer.echo(line)


def mismatch(
    target: RecordedStep, overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option(
        help="Where the page with heat maps goes; default: RUN/mismatch-STEP.html.")] = None,
    by_layer: Annotated[bool, typer.Option(
        help="One pass more per MoE layer, to split the routing part by layer.")] = True,
) -> None:
    """Split the log-prob gap between trainer and engine into its causes."""
    from grpo_megatron.launch.mismatch import report_mismatch

    for line in report_mismatch(*_run_and_step(target), overrides or [], html, by_layer=by_layer):
        typer.echo(line)


def _run_and_step(target: str) -> tuple[Path, int | None]:
    from grpo_megatron.errors import ConfigError

    run, at, step = target.rpartition("@")
    if at and not step.isdecimal():
        raise ConfigError(f"{step!r} is not a step number", where=target,
                          remedy=f"for example {run}@100")
    check_run(path := Path(run if at else target))
    return path, int(step) if at else None


def check_run(run: Path) -> None:
    """Raises ConfigError with the runs that there are."""
    from grpo_megatron.errors import ConfigError

    if not _is_run(run):
        raise ConfigError(f"{run} is not a run: it has no config.json", where=str(run.absolute()),
                          remedy="runs here: " + (", ".join(runs_beside(run)[:5]) or "none"))


def _is_run(path: Path) -> bool:
    from grpo_megatron.rundir import RunDir

    return RunDir(path).config.is_file()


def runs_beside(path: Path) -> list[str]:
    """Runs in the parent directory and in `runs/`, those with a similar name first."""
    from grpo_megatron.config.suggest import nearest

    folders = (path.parent, Path("runs"))
    found = {str(run): run.name for folder in folders if folder.is_dir()
             for run in sorted(folder.iterdir()) if _is_run(run)}
    near = nearest(path.name, found.values())
    return sorted(found, key=lambda run: found[run] not in near)
