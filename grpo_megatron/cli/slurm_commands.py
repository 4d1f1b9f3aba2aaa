"""`submit`, `status`, `logs`, `cancel`: runs as Slurm jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Overrides, Run, check_run, runs_beside


def submit(
    recipe: Annotated[str, typer.Argument(help="As for train.")],
    overrides: Overrides = None,
    site: Annotated[str, typer.Option(
        help="File with the cluster's settings, or a shipped one (bare, pyxis, apptainer).")] = "",
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the batch script; write and submit nothing.")] = False,
    after: Annotated[str, typer.Option(
        help="Id of a job that must have succeeded first; else this one is cancelled.")] = "",
) -> None:
    """Submit a recipe as a Slurm job. Prints the job's id."""
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.launch import slurm
    from grpo_megatron.plan.resolve import resolve
    from grpo_megatron.rundir import RunDir

    if not site:
        raise ConfigError("which site?", where="--site", remedy="copy one of slurm/sites/*.env")
    resolved = resolve(recipe, overrides or [])
    if dry_run:
        typer.echo(slurm.render(RunDir(resolved.run_path), resolved, site))
        return
    flags = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    job = slurm.submit(resolved, site, flags)
    typer.echo(job)
    typer.echo(f"submitted; grpo-megatron logs -f {resolved.run_path}", err=True)


def status(runs: Annotated[list[Path] | None, typer.Argument(
        metavar="RUN", show_default=False, help="Default: all below runs/.")] = None) -> None:
    """How far runs are, and how their jobs are."""
    from grpo_megatron.config.resolved import read_stored
    from grpo_megatron.launch import slurm
    from grpo_megatron.rundir import RunDir
    from grpo_megatron.telemetry.events import read_events
    from grpo_megatron.telemetry.metrics import read_metrics

    for path in runs or map(Path, runs_beside(Path("runs/any"))):
        check_run(path)
        run_dir = RunDir(path)
        steps = sum(1 for _ in read_metrics(run_dir.metrics)) if run_dir.metrics.exists() else 0
        events = read_events(run_dir.events)
        last = events[-1]["kind"] if events else "nothing yet"
        job, text = slurm.job_of(run_dir), "no job"
        if job:
            found = slurm.state_of(job)
            text = " ".join([f"job {job}", found.get("JobState", "unknown to Slurm"), *(
                f"{key.lower()} {found[key]}" for key in ("Reason", "Restarts", "RunTime")
                if found.get(key) not in (None, "None"))])
        typer.echo(f"{path}  step {steps}/{read_stored(run_dir.config).config.num_steps}  "
                   f"{text}  last event: {last}")


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
    from grpo_megatron.rundir import RunDir

    check_run(run)
    job = slurm.cancel(RunDir(run), now=now)
    typer.echo(f"job {job} ends" + ("" if now else " after its step"))
