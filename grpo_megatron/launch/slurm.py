"""Jobs of runs: render and submit `slurm/train.sbatch`, say how a job is, end it.

What a job needs lies in the run directory: `slurm/train.sbatch` as submitted, with the site's
settings in it, `slurm/job` with the id, and `config.json`, the resolved recipe."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron import assets
from grpo_megatron.config.loader import ResolvedConfig, read_resolved, write_resolved
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError, RunLockedError, SetupError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events
from grpo_megatron.telemetry.metrics import read_metrics

_SETTINGS = (
    "PARTITION",
    "ROLLOUT_PARTITION",
    "ACCOUNT",
    "TIME_LIMIT",
    "NOTICE_S",
    "MAX_RESTARTS",
    "SBATCH_FLAGS",
    *(f"GRPO_MEGATRON_{name}" for name in ("INTERFACE", "PYTHON", "ENTER", "SRUN_FLAGS")),
)


def render(resolved: ResolvedConfig, site: str) -> str:
    placement = resolved.config.placement
    return render_job(
        resolved.run_path,
        site,
        (placement.trainer_nodes, placement.rollout_nodes, placement.gpus_per_node),
    )


def render_job(
    directory: Path, site: str, sizes: tuple[int, int, int], arguments: Sequence[str] = ()
) -> str:
    """See `slurm/render.sh`. ConfigError: `site`, a file or a shipped one's name, is no good."""
    folder = assets.root() / "slurm"
    shipped = folder / "sites"
    path = next((p for p in (Path(site), shipped / f"{site}.env") if p.is_file()), None)
    if path is None:
        known = sorted(p.stem for p in shipped.glob("*.env"))
        near = nearest(site, known)
        raise ConfigError(
            f"no site {site!r}" + (f", did you mean {near[0]!r}?" if near else ""),
            where="--site",
            remedy="give the path of your own file; examples in "
            f"{assets.display(shipped)}: {', '.join(known)}",
        )
    _refuse_mistyped(path)
    words = (path.resolve(), directory.resolve(), directory.name, *sizes, *arguments)
    done = subprocess.run(
        ["bash", folder / "render.sh", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = re.sub(r"^.*: line \d+: ", "", done.stderr.strip())
        said = re.sub(r"^([A-Z_]+): ", r"\1 is not set: ", said)
        raise ConfigError(
            said or "the file failed",
            where=assets.display(path),
            remedy="set it in the file, or in the environment of this command",
        )
    return done.stdout


def _refuse_mistyped(site: Path) -> None:
    """ConfigError for a name that is nearly that of a setting, which the file lacks."""
    with raised_as(ConfigError, "not UTF-8", UnicodeDecodeError, where=site):
        text = site.read_text(encoding="utf-8")
    found = set(re.findall(r"(?m)^(?:export )?(\w{4,})=", text))
    for name in sorted(found.difference(_SETTINGS)):
        if near := nearest(name, set(_SETTINGS) - found, cutoff=0.88):
            raise ConfigError(
                f"{name} is no setting, did you mean {near[0]}?",
                where=assets.display(site),
                remedy=f"rename it, or set {near[0]} too",
            )


def submit(resolved: ResolvedConfig, site: str, after: Sequence[str] = ()) -> str:
    """Write the script and configuration of a new run and submit it, after the jobs `after`;
    returns the job's id. RunLockedError where its job waits or runs; ConfigError where the run
    exists, `site` is no good, or Slurm refuses it (a directory made for it is removed then)."""
    run_dir = RunDir(resolved.run_path)
    refuse_active(run_dir)
    if not run_dir.slurm.exists() or (run_dir.logs / "latest").exists():
        run_dir.refuse_existing()  # else its job never began
    script = render(resolved, site)
    is_new = not run_dir.root.exists()
    try:
        with run_dir.written():
            run_dir.create()
            run_dir.slurm.mkdir(exist_ok=True)
            write_atomically(run_dir.slurm / "train.sbatch", script)
            write_resolved(run_dir.config, resolved)
        return submit_again(run_dir, after)
    except (ConfigError, SetupError):
        if is_new:
            shutil.rmtree(run_dir.root, ignore_errors=True)
        raise


def resume(path: Path, overrides: Sequence[str]) -> str:
    """As `submit_again`; ConfigError for a finished run, or overrides that its script lacks."""
    run_dir = RunDir(path)
    refuse_active(run_dir)
    if run_dir.result.exists() and not overrides:
        raise ConfigError(
            "the run is finished", where=str(run_dir.result), remedy="num_steps=… trains it further"
        )
    if overrides:
        old = read_resolved(run_dir.config).config
        resolved = resolve_run(run_dir.config, overrides)
        if any(
            getattr(old, key) != getattr(resolved.config, key)
            for key in ("name", "runs_dir", "placement")
        ):
            raise ConfigError(
                "a resumed job keeps name, runs_dir and placement",
                where="overrides",
                remedy=f"submit another run with model.path={run_dir.export}",
            )
        write_resolved(run_dir.config, resolved)
    return submit_again(run_dir)


def refuse_active(run_dir: RunDir) -> None:
    """RunLockedError where the run's job has not ended."""
    if job := active_job(run_dir):
        raise RunLockedError(
            f"{run_dir.root} is being written by Slurm job {job}",
            where=str(run_dir.slurm / "job"),
            remedy=f"wait for it, or grpo-megatron cancel {run_dir.root}",
        )


def submit_again(run_dir: RunDir, after: Sequence[str] = ()) -> str:
    """Submit the kept script, after the jobs `after`; its id. ConfigError: Slurm refuses it."""
    script = str(run_dir.slurm / "train.sbatch")
    flags = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    try:
        job = slurm("sbatch", "--parsable", *(flags if after else ()), script).partition(";")[0]
    except SetupError as error:
        if error.where == "PATH":
            raise
        remedy = error.remedy or "change the site's file; submit --dry-run prints the script"
        if "partition" in error.message:
            known = sorted(set(slurm("sinfo", "--noheader", "--format=%R").split()))
            remedy = f"set (ROLLOUT_)PARTITION in the site's file to one of {', '.join(known)}"
        raise ConfigError(error.message, where=error.where, remedy=remedy) from None
    write_atomically(run_dir.slurm / "job", job + "\n")
    return job


def job_of(run_dir: RunDir) -> str | None:
    file = run_dir.slurm / "job"
    return file.read_text().strip() if file.exists() else None


def active_job(run_dir: RunDir) -> str | None:
    job = job_of(run_dir)
    return job if job and is_active(job) else None


def is_active(job: str) -> bool:
    """Whether Slurm still has the job to run, to end or to start again."""
    return state_of(job).get("JobState") in (
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "SUSPENDED",
        "COMPLETING",
        "REQUEUED",
    )


def state_of(job: str) -> dict[str, str]:
    """What Slurm says of a job (JobState, Reason, Restarts, …); {} if it has forgotten it.
    SetupError where Slurm does not answer: the job may well be running."""
    try:
        words = slurm("scontrol", "--oneliner", "show", "job", job).partition("\n")[0].split()
    except SetupError as error:
        if error.where != "PATH" and "Invalid job id" not in error.message:
            raise
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def status_line(path: Path) -> str:
    """One line about a run: its steps, its job, what happened last."""
    run_dir = RunDir(path)
    steps = len(read_metrics(run_dir.metrics)) if run_dir.metrics.exists() else 0
    last = ["nothing yet", *(event["kind"] for event in read_events(run_dir.events))][-1]
    words = ["no job"]
    if job := job_of(run_dir):
        state = state_of(job)
        words = [
            f"job {job}",
            state.get("JobState", "unknown to Slurm"),
            *(
                f"{key.lower()} {state[key]}"
                for key in ("Reason", "Restarts", "RunTime")
                if state.get(key, "None") != "None"
            ),
        ]
    return (
        f"{path}  step {steps}/{read_resolved(run_dir.config).config.num_steps}  "
        f"{' '.join(words)}  last event: {last}"
    )


def cancel(path: Path, *, now: bool) -> str:
    """End a run's job, with a checkpoint unless `now`; returns the job's id."""
    if (job := active_job(RunDir(path))) is None:
        raise ConfigError(
            "no job of this run waits or runs", where=str(path), remedy="grpo-megatron status"
        )
    running = state_of(job)["JobState"] == "RUNNING"
    slurm("scancel", *(["--batch", "--signal=INT"] if running and not now else []), job)
    return job


def slurm(*command: str) -> str:
    """Output of a Slurm command; SetupError with its message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SetupError(
            f"{command[0]} is not here",
            where="PATH",
            remedy="run this on a login node of the cluster",
        ) from None
    if done.returncode:
        lines = re.sub(r"(?m)^sbatch: (error: )?", "", done.stderr).strip().splitlines()
        raise SetupError("; ".join(lines), where=" ".join(command))
    return done.stdout.strip()
