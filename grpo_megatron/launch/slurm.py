"""Jobs of runs: render and submit `slurm/train.sbatch`, say how a job is, end it.

What a job needs lies in the run directory: `slurm/train.sbatch` as submitted, with the site's
settings in it, `slurm/job` with the id, and `config.json`, the resolved recipe."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_megatron import assets
from grpo_megatron.config.history import record_first_settings
from grpo_megatron.config.loader import ResolvedConfig, read_resolved, write_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError, RunLockedError, SetupError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.resuming import resolve_resumed
from grpo_megatron.launch.stage_record import put_back_stage, tell_changed_stage, text_of_stage
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events
from grpo_megatron.telemetry.metrics import in_short, readable_metrics

_SETTINGS = (
    "PARTITION",
    "ROLLOUT_PARTITION",
    "ENVIRONMENT_PARTITION",
    "ACCOUNT",
    "TIME_LIMIT",
    "NOTICE_S",
    "MAX_RESTARTS",
    "SBATCH_FLAGS",
    "GRPO_MEGATRON_INTERFACE",
    "GRPO_MEGATRON_PYTHON",
    "GRPO_MEGATRON_ENTER",
    "GRPO_MEGATRON_SRUN_FLAGS",
)
_ENDED_STATES = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""Of all others, such as REQUEUE_HOLD or SPECIAL_EXIT, a job may yet run."""
_NOT_OF_A_RUN = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_WAIT_ALL_NODES")
"""Variables of sbatch that ask for what a run's job never is: an array, or one that its submission
waits for."""
_SAID_BY_SCRIPTS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_GPUS_PER_NODE": "--gpus-per-node",
    "SBATCH_JOB_NAME": "--job-name",
    "SBATCH_NO_REQUEUE": "--requeue",
    "SBATCH_OPEN_MODE": "--open-mode",
    "SBATCH_OUTPUT": "--output",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_SIGNAL": "--signal",
    "SBATCH_TIMELIMIT": "--time",
}
"""Variables of sbatch, which it takes before the option in a script."""
_STATES_WITH_A_SCRIPT = ("RUNNING", "SIGNALING", "RESIZING")
"""In them the job's script runs, and can be told to make a checkpoint."""
_HELD_STATES = ("SUSPENDED", "STOPPED")
"""In them the job's script cannot run, and will when the job is let go on."""


class JobSizes(NamedTuple):
    """Nodes of a job, and what it needs of one."""

    trainer_nodes: int = 1
    rollout_nodes: int = 0
    environment_nodes: int = 0
    gpus_per_node: int = 0
    ranks_per_node: int = 1


def render(resolved: ResolvedConfig, site: str) -> str:
    """Return the batch script of a run, as `render_job`."""
    placement = resolved.config.placement
    sizes = JobSizes(
        placement.trainer_nodes,
        placement.rollout_nodes,
        placement.environment_nodes,
        placement.gpus_per_node,
        resolved.config.trainer.num_ranks // placement.trainer_nodes,
    )
    return render_job(resolved.run_path, site, sizes)


def render_job(directory: Path, site: str, sizes: JobSizes, arguments: Sequence[str] = ()) -> str:
    """Return the batch script of a job in `directory`, see `slurm/render.sh`. arguments: of the
    command, if it is not `train`.

    Raises ConfigError: `site`, a file or a shipped one's name, is no good."""
    path = _site_file(site)
    _refuse_mistyped(path)
    words = (path.resolve(), directory.resolve(), directory.name, *sizes, *arguments)
    done = subprocess.run(
        ["bash", assets.root() / "slurm" / "render.sh", *map(str, words)],
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


def _site_file(site: str) -> Path:
    """Return the user's file, or else the shipped one of that name. Raises ConfigError: there is
    neither."""
    shipped = assets.root() / "slurm" / "sites"
    for path in (Path(site), shipped / f"{site}.env"):
        if path.is_file():
            return path
    known = sorted(file.stem for file in shipped.glob("*.env"))
    problem = f"no site {site!r}"
    near = nearest(site, known)
    if near:
        problem += f", did you mean {near[0]!r}?"
    raise ConfigError(
        problem,
        where="--site",
        remedy="give the path of your own file; examples in "
        f"{assets.display(shipped)}: {', '.join(known)}",
    )


def _refuse_mistyped(site: Path) -> None:
    """ConfigError for a name that is nearly that of a setting, which the file lacks."""
    with raised_as(ConfigError, "not UTF-8", UnicodeDecodeError, where=site):
        text = site.read_text(encoding="utf-8")
    found = set(re.findall(r"(?m)^(?:export )?(\w{4,})=", text))
    for name in sorted(found.difference(_SETTINGS)):
        near = nearest(name, set(_SETTINGS) - found, cutoff=0.88)
        if near:
            raise ConfigError(
                f"{name} is no setting, did you mean {near[0]}?",
                where=assets.display(site),
                remedy=f"rename it, or set {near[0]} too",
            )


def submit(resolved: ResolvedConfig, site: str, after: Sequence[str] = ()) -> str:
    """Write the script and configuration of a new run and submit it, after the jobs `after`;
    returns the job's id. It takes the place of one that has recorded nothing, but for its logs.
    RunLockedError where its job waits or runs, or somebody else writes it; ConfigError where the
    run exists, `site` is no good, or Slurm refuses it (a directory made for it is removed then)."""
    # imported here: it needs this module
    from grpo_megatron.launch.unrecorded import clear_unrecorded, has_recorded_nothing

    run_dir = RunDir(resolved.run_path)
    refuse_active(run_dir)
    has_begun = not run_dir.slurm.exists() or (run_dir.logs / "latest").exists()
    is_expendable = has_begun and has_recorded_nothing(run_dir)
    if has_begun and not is_expendable:
        removal = shlex.join(["rm", "-r", str(run_dir.root)])
        run_dir.refuse_existing(replace_by=f"remove it: {removal}")
    script = render(resolved, site)
    if is_expendable:
        clear_unrecorded(run_dir)
        print(
            f"{run_dir.root} had recorded no step and begins anew; its logs stay",
            file=sys.stderr,
            flush=True,
        )
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


def resume(
    path: Path, overrides: Sequence[str], check: Callable[[RunConfig], None] = lambda config: None
) -> str:
    """Submit the kept script again, as `submit_again` does. Raises ConfigError for a finished run,
    or overrides that its script lacks.

    check: of a configuration with overrides, before its job waits; raises what is wrong with it."""
    run_dir = RunDir(path)
    refuse_active(run_dir)
    if run_dir.result.exists() and not overrides:
        raise ConfigError(
            "the run is finished", where=str(run_dir.result), remedy="num_steps=… trains it further"
        )
    if overrides:
        old = read_resolved(run_dir.config).config
        resolved = resolve_resumed(run_dir, overrides)
        if resolved.config.placement != old.placement:
            first_export, *_ = run_dir.exports(old.adapter_domains)
            remedy = "submit another run, with another name=…"
            if first_export.exists():
                remedy += f" and model.path={shlex.quote(str(first_export))}"
            raise ConfigError("a resumed job keeps its placement", where="overrides", remedy=remedy)
        check(resolved.config)
        record_first_settings(run_dir)
        before = run_dir.config.read_text(encoding="utf-8")
        stage_before = text_of_stage(run_dir)
        tell_changed_stage(run_dir, resolved)
        write_resolved(run_dir.config, resolved)
        try:
            return submit_again(run_dir)
        except (ConfigError, SetupError):
            write_atomically(run_dir.config, before)
            put_back_stage(run_dir, stage_before)
            raise
    return submit_again(run_dir)


def refuse_active(run_dir: RunDir) -> None:
    """RunLockedError where the run's job has not ended."""
    job = active_job(run_dir)
    if job is not None:
        raise RunLockedError(
            f"{run_dir.root} is being written by Slurm job {job}",
            where=str(run_dir.slurm / "job"),
            remedy=f"wait for it, or {run_dir.command('cancel')}",
        )


def submit_again(run_dir: RunDir, after: Sequence[str] = ()) -> str:
    """Submit the kept script, after the jobs `after`; returns the job's id.

    Raises ConfigError: Slurm refuses it."""
    script = str(run_dir.slurm / "train.sbatch")
    flags = ["--parsable"]
    if after:
        flags += [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    try:
        said = slurm("sbatch", *flags, script, environment=_sbatch_environment(script))
        job = said.partition(";")[0]
        if not job:
            raise SetupError(
                "sbatch named no job",
                where=script,
                remedy="nothing was queued; take --test-only and the like out of SBATCH_FLAGS",
            )
    except SetupError as error:
        if error.where == "PATH":
            raise
        remedy = error.remedy or "change the site's file; submit --dry-run prints the script"
        if after and "dependency" in error.message:
            remedy = f"what it waits for (--after) can no longer succeed: {', '.join(after)}"
        elif "partition" in error.message:
            known = sorted(set(slurm("sinfo", "--noheader", "--format=%R").split()))
            remedy = f"set (ROLLOUT_)PARTITION in the site's file to one of {', '.join(known)}"
        raise ConfigError(error.message, where=error.where, remedy=remedy) from None
    write_atomically(run_dir.slurm / "job", job + "\n")
    return job


def _sbatch_environment(script: str) -> dict[str, str]:
    """The variables of this process without those that would override what a script says."""
    text = Path(script).read_text(encoding="utf-8")
    overriding = list(_NOT_OF_A_RUN)
    for variable, option in _SAID_BY_SCRIPTS.items():
        if re.search(rf"^#SBATCH {option}\b", text, re.MULTILINE):
            overriding.append(variable)
    return {name: value for name, value in os.environ.items() if name not in overriding}


def refuse_unfit_parent(job: str) -> None:
    """ConfigError where a new job could not wait for the success of `job`: Slurm takes one that it
    does not know as one that has succeeded."""
    state = state_of(job)
    if not state and shutil.which("scontrol") is None:
        return  # `sbatch` is not here either, which it says
    name = state.get("JobState")
    if name == "COMPLETED" or (state and name not in _ENDED_STATES):
        return
    problem = f"Slurm knows no job {job}"
    if state:
        problem = f"job {job} did not succeed: {name}"
    raise ConfigError(
        problem,
        where="--after",
        remedy="give the id of a job that waits, runs or has just succeeded; Slurm forgets jobs "
        "some minutes after their end: without --after where it succeeded earlier",
    )


def job_of(run_dir: RunDir) -> str | None:
    """Return the id of the run's newest job; None where it never had one."""
    file = run_dir.slurm / "job"
    if not file.exists():
        return None
    return file.read_text().strip()


def active_job(run_dir: RunDir) -> str | None:
    """Return the id of the run's job; None where it has ended, or never was."""
    job = job_of(run_dir)
    if not job or not is_active(job):
        return None
    return job


def is_active(job: str) -> bool:
    """Whether Slurm still has the job to run, to end or to start again; so it is in a state that
    is not known here."""
    return _is_active_state(state_of(job))


def _is_active_state(state: dict[str, str]) -> bool:
    return bool(state) and state.get("JobState") not in _ENDED_STATES


def state_of(job: str) -> dict[str, str]:
    """Ask Slurm about a job (JobState, Reason, Restarts, …); {} if it has forgotten it.
    SetupError where Slurm does not answer: the job may well be running."""
    try:
        answer = slurm("scontrol", "--oneliner", "show", "job", job)
    except SetupError as error:
        if error.where != "PATH" and "Invalid job id" not in error.message:
            raise
        return {}
    state = {}
    for word in answer.partition("\n")[0].split():
        key, is_setting, value = word.partition("=")
        if is_setting:
            state[key] = value
    return state


class JobStates:
    """States of several jobs, of which Slurm is asked no more once it has not answered: that takes
    a minute each time.

    Attributes:
        error: Why there was no answer; None: there were answers only."""

    def __init__(self) -> None:
        self.error: SetupError | None = None

    def of(self, job: str) -> dict[str, str] | None:
        """Return what `state_of` does; None where Slurm does not answer."""
        if self.error is not None:
            return None
        try:
            return state_of(job)
        except SetupError as error:
            error.remedy = error.remedy or "ask again later; what runs is not touched by this"
            self.error = error
            return None

    def words(self, job: str) -> str:
        """Return the state of a job as a word or a few."""
        state = self.of(job)
        if state is None:
            return "(Slurm does not answer)"
        return state.get("JobState", "unknown to Slurm")

    def has_ended(self, job: str) -> bool:
        """Whether Slurm says that a job has ended, or no longer knows it."""
        state = self.of(job)
        return state is not None and not _is_active_state(state)


def is_left_by_job(run_dir: RunDir, states: JobStates) -> bool:
    """Whether a run's lock is that of a job which has ended without a farewell."""
    owner = re.search(r"Slurm job (\d+)", lock_owner(run_dir))
    return owner is not None and states.has_ended(owner[1])


def lock_owner(run_dir: RunDir) -> str:
    """Return who took a run's lock, see `run_lock`; empty where its last owner ended well."""
    try:
        return run_dir.lock.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def status_line(path: Path, states: JobStates | None = None) -> str:
    """Return one line about a run: its steps, its job, what happened last, or why it failed; and
    which lines of its metrics are damaged. states: of jobs, where several are asked for."""
    run_dir = RunDir(path)
    num_steps = read_resolved(run_dir.config).config.num_steps
    steps, problems = readable_metrics(run_dir.metrics)
    note = ""
    num_done = "0"
    if problems:
        num_done = "?"
        note = f"  {run_dir.metrics.name}: {in_short(problems)}"
    if steps:
        # what a machine wrote last may be lost, so that lines are fewer than steps
        num_done = str(steps[-1]["step"] + 1)
    job = _job_words(job_of(run_dir), states or JobStates())
    return f"{path}  step {num_done}/{num_steps}  {job}  {_last_event_words(run_dir)}{note}"


def _last_event_words(run_dir: RunDir) -> str:
    events = read_events(run_dir.events)
    if not events:
        return "last event: nothing yet"
    last = events[-1]
    if last["kind"] != "failed":
        return f"last event: {last['kind']}"
    reason = str(last.get("reason", "")).partition("\n")[0]
    return f"failed (exit code {last.get('exit_code')}): {reason}"


def _job_words(job: str | None, states: JobStates) -> str:
    if not job:
        return "no job"
    state = states.of(job)
    if state is None:
        return f"job {job} (Slurm does not answer)"
    words = [f"job {job}", state.get("JobState", "unknown to Slurm")]
    for key in ("Reason", "Restarts", "RunTime"):
        value = state.get(key, "None")
        if value != "None":
            words.append(f"{key.lower()} {value}")
    return " ".join(words)


def cancel(path: Path, *, now: bool) -> str:
    """End a run's job, with a checkpoint unless `now`; returns what becomes of the job.

    Raises ConfigError where no job of the run waits or runs, and where it is held so that it can
    make no checkpoint."""
    run_dir = RunDir(path)
    job = active_job(run_dir)
    if job is None:
        raise ConfigError(
            "no job of this run waits or runs", where=str(path), remedy=_how_to_stop(run_dir)
        )
    state = state_of(job).get("JobState", "of an unknown state")
    if now:
        slurm("scancel", job)
        return f"job {job} ends"
    if state in _HELD_STATES:
        raise ConfigError(
            f"job {job} is {state} and can make no checkpoint",
            where=str(path),
            remedy=f"scontrol resume {job}, then again; or without a checkpoint: "
            f"{run_dir.command('cancel', '--now')}",
        )
    if state in _STATES_WITH_A_SCRIPT:
        slurm("scancel", "--batch", "--signal=INT", job)
        return f"job {job} ends after its step"
    slurm("scancel", job)
    return f"job {job} is cancelled; it was {state}: no step was under way"


def _how_to_stop(run_dir: RunDir) -> str:
    """Say how to stop a run that has no job."""
    process = re.match(r"process (\d+) on (\S+?),?(?: |$)", lock_owner(run_dir))
    if process is None:
        return "grpo-megatron status"
    return (
        f"where it runs on {process[2]}: kill -INT {process[1]} (Ctrl-C) ends it after its step "
        "with a checkpoint"
    )


def slurm(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a Slurm command; SetupError with its message.

    environment: its variables; None: those of this process."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
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
