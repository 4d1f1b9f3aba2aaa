"""`train`, `resume`, `replay`, `mismatch`, `report`; jobs: `submit`, `status`, `logs`, `cancel`."""

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_megatron import assets
from grpo_megatron.config.loader import is_of_model
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError
from grpo_megatron.rundir import RunDir


def flag(name: str, meaning: str) -> Any:
    """An option without a `--no-` form."""
    return typer.Option(f"--{name}", help=meaning)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        show_default=False,
        help="Settings on top of the recipe, for example trainer.num_ranks=4.",
    ),
]
Recipe = Annotated[
    str, typer.Argument(help="Path of a recipe, or the name of a shipped one (demo/gspo-moe-cpu).")
]
Run = Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.")]
RecordedStep = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help=(
            "Run directory and recorded step, for example runs/demo@200; "
            "default: the newest that can be computed again."
        ),
    ),
]
Site = Annotated[
    str, typer.Option(help="File with the cluster's settings; examples: bare, pyxis, apptainer.")
]
SkipRewardCheck = Annotated[
    bool,
    flag(
        "skip-reward-check",
        ("Go on although rewards can only be imported on the cluster; a wrong one ends the job."),
    ),
]
InJob = Annotated[
    bool, flag("in-job", "Start the processes as steps of the Slurm job around this one.")
]


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume_if_exists: Annotated[
        bool, flag("resume-if-exists", "Continue the run of this name if there is one.")
    ] = False,
    overwrite: Annotated[
        bool, flag("overwrite", "Delete the run of this name and start anew.")
    ] = False,
    in_job: InJob = False,
    stage: Annotated[Path | None, typer.Option("--stage", hidden=True)] = None,
) -> None:
    """Train from a recipe. The run directory is runs_dir/name."""
    from grpo_megatron.plan.resolve import resolve

    if overwrite and resume_if_exists:
        raise ConfigError(
            "--overwrite and --resume-if-exists exclude each other",
            where="command line",
            remedy="choose one of them",
        )
    flags = overrides or []
    resolved = resolve(recipe, flags)
    print_advice(resolved.config)
    from grpo_megatron.launch import local

    record = ""
    if stage is not None:
        record = stage.read_text(encoding="utf-8")
    if resume_if_exists and _is_run(resolved.run_path):
        raise typer.Exit(local.resume(resolved.run_path, flags, in_job=in_job, stage_record=record))
    raise typer.Exit(local.train(resolved, overwrite=overwrite, in_job=in_job, stage_record=record))


def resume(
    run: Run,
    overrides: Overrides = None,
    in_job: InJob = False,
    here: Annotated[
        bool, flag("here", "On this machine, also if the run was submitted as a job.")
    ] = False,
    skip_reward_check: SkipRewardCheck = False,
) -> None:
    """Continue a run from its newest checkpoint; one that was submitted, as a job again."""
    check_run(run)
    from grpo_megatron.launch import local, slurm
    from grpo_megatron.plan.resolve import resolve_run

    if (RunDir(run).slurm / "train.sbatch").exists() and not in_job and not here:
        check = partial(_check_resumed, skip_reward_check=skip_reward_check)
        typer.echo(slurm.resume(run, overrides or [], check))
        return
    if skip_reward_check:
        warn_unchecked_rewards()
    print_advice(resolve_run(RunDir(run).config, overrides or []).config)
    code = local.resume(run, overrides or [], in_job=in_job, skip_reward_check=skip_reward_check)
    raise typer.Exit(code)


def submit(
    recipe: Recipe,
    site: Site,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, flag("dry-run", "Print the batch script; write and submit nothing.")
    ] = False,
    after: Annotated[
        str | None,
        flag("after", ("Id of a job that must have succeeded first; else this one is cancelled.")),
    ] = None,
    skip_reward_check: SkipRewardCheck = False,
) -> None:
    """Submit a recipe as a Slurm job. Prints the job's id."""
    from grpo_megatron.config.gates import refuse_absent_runs
    from grpo_megatron.launch import slurm
    from grpo_megatron.plan.resolve import refuse_missing, resolve

    if after is not None and not after.isdecimal():
        raise ConfigError(
            f"{after!r} is no id of a job",
            where="--after",
            remedy="a number, as submit prints it; it is empty where that submit failed",
        )
    resolved = resolve(recipe, overrides or [])
    print_advice(resolved.config, coming=after is not None)
    if dry_run:
        typer.echo(slurm.render(resolved, site))
        return
    if after is not None:
        slurm.refuse_unfit_parent(after)
    refuse_missing(resolved.config, coming=after is not None)
    if after is None:  # else that job may be the one to compare with
        refuse_absent_runs(resolved.config.gates)
    refuse_unbound(resolved.config, skip_reward_check=skip_reward_check)
    after_jobs = []
    if after is not None:
        after_jobs.append(after)
    typer.echo(slurm.submit(resolved, site, after_jobs))
    typer.echo(f"submitted; {RunDir(resolved.run_path).command('logs', '-f')}", err=True)


def refuse_unbound(config: Any, *, skip_reward_check: bool) -> None:
    """Try what a recipe names outside of itself before its job waits; see `launch.bindings`.

    skip_reward_check: not what may be on the cluster only."""
    from grpo_megatron.launch.bindings import SKIP_REMEDY, refuse_unbound_code, refuse_unfit_data

    if skip_reward_check:
        warn_unchecked_rewards()
    else:
        refuse_unbound_code(config, remedy=SKIP_REMEDY)
    refuse_unfit_data(config)


def _check_resumed(config: Any, *, skip_reward_check: bool) -> None:
    """Say what is unusual in the settings of a job that goes on, and refuse what `refuse_unbound`
    does."""
    print_advice(config)
    refuse_unbound(config, skip_reward_check=skip_reward_check)


def print_advice(config: Any, *, stage: str = "", coming: bool = False) -> None:
    """Say on stderr what is unusual in a valid recipe, a line each.

    stage: of a graph, whose recipe it is; coming: as `advice_for` takes it."""
    from grpo_megatron.config.problems import as_toml
    from grpo_megatron.data.format_advice import advice_on_formats
    from grpo_megatron.plan.advice import advice_for

    lines = []
    for unusual in advice_for(config, coming=coming):
        lines.append(f"{unusual.key} = {as_toml(unusual.value)}: {unusual.message}")
    lines += advice_on_formats(config)
    place = ""
    if stage:
        place = f"stage {stage}: "
    for line in lines:
        typer.echo(f"warning: {place}{line}", err=True)


def warn_unchecked_rewards() -> None:
    """Say on stderr what `--skip-reward-check` leaves to the job."""
    typer.echo(
        "warning: rewards are not checked here; one that cannot be imported or called "
        "ends the job with exit code 10 when its controller starts",
        err=True,
    )


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", show_default=False, help="Default: all below runs/."),
    ] = None,
) -> None:
    """How far runs are, and how their jobs are; of runs that are named, what each role does.

    The exit code is that of a named run's damaged configuration, and 3 where Slurm does not
    answer."""
    from grpo_megatron.launch.role_status import role_lines
    from grpo_megatron.launch.slurm import JobStates, is_left_by_job, status_line

    code = 0
    states = JobStates()
    for path in runs or map(Path, runs_beside(Path("runs/any"))):
        check_run(path)
        try:
            typer.echo(status_line(path, states))
        except ConfigError as error:  # of one run, in its line
            typer.echo(f"{path}  {error.message}")
            if runs:
                code = error.exit_code
        if runs and not is_left_by_job(RunDir(path), states):
            for line in role_lines(RunDir(path)):
                typer.echo(line)
    if states.error is not None:
        raise states.error
    raise typer.Exit(code)


def logs(run: Run, follow: Annotated[bool, typer.Option("-f", "--follow")] = False) -> None:
    """Last lines of every process of a run's newest attempt, and of its job."""
    check_run(run)
    from grpo_megatron.launch import slurm

    folder = RunDir(run).logs
    job = slurm.job_of(RunDir(run))
    files = sorted(folder.glob("latest/*.log"))
    if job:
        files.insert(0, folder / f"slurm-{job}.out")
    tail = ["tail", "-n", "20"]
    if follow:
        for role in ("controller", "trainer-0"):  # also what is yet to appear
            files.append(folder / "latest" / f"{role}.log")
        # inotify would miss a new `latest`, and what other nodes write
        tail += ["-F", "---disable-inotify"]
    else:
        files = [file for file in files if file.exists()]
    if not files:
        typer.echo(slurm.status_line(run))
        return
    os.execvp("tail", [*tail, *map(str, dict.fromkeys(files))])


def cancel(run: Run, now: Annotated[bool, flag("now", "Without a checkpoint.")] = False) -> None:
    """End a run's job, after its current step and with a checkpoint."""
    from grpo_megatron.launch import slurm

    check_run(run)
    typer.echo(slurm.cancel(run, now=now))


def replay(target: RecordedStep, overrides: Overrides = None) -> None:
    """Train a recorded step again from its checkpoint and compare with what was recorded.

    Follows the recorded samples, routes, clip and mask decisions, at the layout that overrides
    ask for. Exit code 7 if loss or gradient norm differ by more than rounding explains."""
    from grpo_megatron.launch.replay import replay_step

    for line in replay_step(*_run_and_step(target), overrides or []):
        typer.echo(line)


def mismatch(
    target: RecordedStep,
    overrides: Overrides = None,
    html: Annotated[
        Path | None,
        flag("html", "Where the page with heat maps goes; default: RUN/mismatch-STEP.html."),
    ] = None,
    by_layer: Annotated[
        bool, typer.Option(help="One pass more per MoE layer, to split the routing part by layer.")
    ] = True,
) -> None:
    """Split the log-prob gap between trainer and engine into its causes."""
    from grpo_megatron.launch.mismatch import report_mismatch

    for line in report_mismatch(*_run_and_step(target), overrides or [], html, by_layer=by_layer):
        typer.echo(line)


def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_GRAPH",
            help="Directory of a run; of a graph its file, or the name of a shipped one.",
        ),
    ],
    to: Annotated[Path | None, typer.Option(metavar="FILE.html")] = None,
) -> None:
    """Curves, samples, stages, memory as one page, by default report.html beside what it shows."""
    shipped = assets.names(assets.root() / "recipes" / "graphs")
    if not target.endswith(".toml") and target not in shipped:
        check_run(Path(target))
    from grpo_megatron.stages.report import write_report

    typer.echo(write_report(target, to))


def _run_and_step(target: str) -> tuple[Path, int | None]:
    """What `RUN` or `RUN@STEP` says; None: the newest step."""
    run, at, step = target.rpartition("@")
    if not at:
        path = Path(target)
        check_run(path)
        return path, None
    if not step.isdecimal():
        raise ConfigError(
            f"{step!r} is not a step number",
            where=target,
            remedy="for example " + shlex.quote(f"{run}@100"),
        )
    path = Path(run)
    check_run(path)
    return path, int(step)


def check_run(run: Path) -> None:
    """Raises ConfigError with the runs that there are."""
    if not _is_run(run):
        raise ConfigError(
            f"{run} is not a run: it has no config.json",
            where=str(run.absolute()),
            remedy="runs here: " + (", ".join(runs_beside(run)[:5]) or "none"),
        )
    if is_of_model(RunDir(run).config.read_bytes()):
        remedy = (
            "`grpo-megatron eval RECIPE MODEL` measures a model, `model.path` trains it further"
        )
        owner = run.absolute().parent.parent
        if _is_run(owner):
            remedy = f"name its run, {owner}"
        raise ConfigError(
            f"{run} is a checkpoint, not a run", where=str(run.absolute()), remedy=remedy
        )


def _is_run(path: Path) -> bool:
    return RunDir(path).config.is_file()


def runs_beside(path: Path) -> list[str]:
    """Runs in the parent directory and in `runs/`, those with a similar name first."""
    found = {}
    for folder in (path.parent, Path("runs")):
        if not folder.is_dir():
            continue
        for run in sorted(folder.iterdir()):
            is_checkpoint = not RunDir(run).logs.is_dir()
            if _is_run(run) and not is_checkpoint:
                found[str(run)] = run.name
    near = nearest(path.name, found.values())
    return sorted(found, key=lambda run: found[run] not in near)
