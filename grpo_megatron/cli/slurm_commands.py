"""`submit`, `status`, `logs`, `cancel`: runs as Slurm jobs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Overrides, Run, check_run, runs_beside


def submit(
    recipe: Annotated[str, typer.Argument(help="As for train.")],
    site: Annotated[str, typer.Option(
        help="File with the cluster's settings; examples: bare, pyxis, apptainer.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the batch script; write and submit nothing.")] = False,
    after: Annotated[str, typer.Option(
        help="Id of a job that must have succeeded first; else this one is cancelled.")] = "",
) -> None:
    """Submit a recipe as a Slurm job. Prints the job's id."""
    from grpo_megatron.launch import slurm
    from grpo_megatron.plan.resolve import resolve

    resolved = resolve(recipe, overrides or [])
    if dry_run:
        typer.echo(slurm.render(resolved, site))
        return
    flags = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    typer.echo(slurm.submit(resolved, site, flags))
    typer.echo(f"submitted; grpo-megatron logs -f {resolved.run_path}", err=True)


def status(runs: Annotated[list[Path] | None, typer.Argument(
        metavar="RUN", show_default=False, help="Default: all below runs/.")] = None) -> None:
    """How far runs are, and how their jobs are."""
    from grpo_megatron.launch.slurm import status_line

    for path in runs or map(Path, runs_beside(Path("runs/any"))):
        check_run(path)
        typer.echo(status_line(path))


def logs(run: Run, follow: Annotated[bool, typer.Option("-f", "--follow")] = False) -> None:
    """Last lines of every process of a run's newest attempt, and of its job."""
    from grpo_megatron.rundir import RunDir

    check_run(run)
    folder = RunDir(run).logs
    files = [*sorted(folder.glob("slurm-*.out"))[-1:], *sorted(folder.glob("latest/*.log"))]
    os.execvp("tail", ["tail", *(["-F"] if follow else []), "-n", "20", *map(str, files)])


def cancel(run: Run, now: Annotated[bool, typer.Option(
        "--now", help="Without a checkpoint.")] = False) -> None:
    """End a run's job, after its current step and with a checkpoint."""
    from grpo_megatron.launch import slurm

    check_run(run)
    typer.echo(f"job {slurm.cancel(run, now=now)} ends" + ("" if now else " after its step"))
