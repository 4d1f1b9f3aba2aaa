"""Jobs of runs: render and submit `slurm/train.sbatch`, say how a job is, end it.

What a job needs lies in the run directory: `slurm/train.sbatch` as submitted, with the site's
settings in it, `slurm/job` with the id, and `config.json`, the resolved recipe.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron import assets
from grpo_megatron.config.resolved import ResolvedConfig, write_resolved
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError, RunLockedError, SetupError
from grpo_megatron.files import write_atomically
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir

# of a site's file: names that it assigns, and those that it takes from the environment
_NAMES = re.compile(r"^(?:export )?([A-Z][A-Z0-9_]*)=|\$\{([A-Z][A-Z0-9_]*):[-?]", re.MULTILINE)
_BODY = "# --- the job\n"


def read_site(name: str) -> tuple[Path, dict[str, str]]:
    """The site's file and its settings as bash reads them here.

    Args:
        name: Path of a file, or the name of a shipped example.

    Raises:
        ConfigError: There is no such file, it is not bash, or a setting is missing.
    """
    shipped = assets.slurm() / "sites"
    path = next((p for p in (Path(name), shipped / f"{name}.env") if p.is_file()), None)
    if path is None:
        known = sorted(p.stem for p in shipped.glob("*.env"))
        near = nearest(name, known)
        raise ConfigError(f"no site {name!r}" + (f", did you mean {near[0]!r}?" if near else ""),
                          where="--site", remedy="give the path of your own file; examples in "
                                                 f"{assets.display(shipped)}: {', '.join(known)}")
    names = sorted({name for pair in _NAMES.findall(path.read_text()) for name in pair if name}
                   | {"PARTITION"})
    values = "".join(f'printf "%s\\0" "${{{name}-}}"; ' for name in names)
    done = subprocess.run(["bash", "-euc", f'. "$0"; {values}', str(path.resolve())],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.sub(r"^.*: line \d+: ", "", done.stderr.strip())
        raise ConfigError(said or "the file failed",
                          where=assets.display(path),
                          remedy="set it in the file, or in the environment of this command")
    return path, dict(zip(names, done.stdout.split("\0"), strict=False))


def render(run_dir: RunDir, resolved: ResolvedConfig, site: str) -> str:
    """The batch script of a run. Raises ConfigError: see `read_site`."""
    path, settings = read_site(site)
    shipped = (assets.slurm() / "train.sbatch").read_text()
    about, _, body = shipped.partition(_BODY)
    comment = [line for line in about.splitlines()[1:] if line.startswith("# ")][:2]
    given = "\n".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return "\n".join([
        "#!/usr/bin/env bash", *comment, *_directives(run_dir, resolved, settings), "",
        f"# --- the site: {assets.display(path)}", given, path.read_text().rstrip(), "",
        f"set -- {shlex.quote(str(run_dir.root.resolve()))}", _BODY + body])


def _directives(run_dir: RunDir, resolved: ResolvedConfig, site: dict[str, str]) -> list[str]:
    placement = resolved.config.placement
    everywhere = [f"--job-name={resolved.config.name}", f"--time={site.get('TIME_LIMIT') or 60}",
                  *shlex.split(site.get("SBATCH_FLAGS", ""))]
    if account := site.get("ACCOUNT"):
        everywhere.append(f"--account={account}")
    if placement.gpus_per_node:
        everywhere.append(f"--gpus-per-node={placement.gpus_per_node}")
    first = ["--requeue", "--open-mode=append",
             f"--signal=B:USR1@{site.get('NOTICE_S') or 600}",
             f"--output={(run_dir.root / 'logs').resolve()}/slurm-%j.out"]
    parts = [[*everywhere, *first, f"--partition={site['PARTITION']}"]]
    if (second := site.get("ROLLOUT_PARTITION")) and placement.rollout_nodes:  # a hetjob
        parts[0].append(f"--nodes={placement.trainer_nodes}")
        parts.append([*everywhere, f"--partition={second}", f"--nodes={placement.rollout_nodes}"])
    else:
        parts[0].append(f"--nodes={placement.num_nodes}")
    lines = "\n#SBATCH hetjob\n".join(
        "\n".join(f"#SBATCH {shlex.quote(flag)}" for flag in part) for part in parts)
    return lines.splitlines()


def submit(resolved: ResolvedConfig, site: str, flags: Sequence[str] = ()) -> str:
    """Prepare the run directory and submit its job; returns the job's id.

    Args:
        flags: For this sbatch only, such as `--dependency=…`.

    Raises:
        ConfigError: The run exists, or the site is not right.
    """
    run_dir = RunDir(resolved.run_path)
    if run_dir.config.exists():
        raise ConfigError(f"run {resolved.config.name!r} exists", where=str(run_dir.root),
                          remedy=f"go on with it by `grpo-megatron resume {run_dir.root}`, or "
                                 "choose another name=…")
    script = render(run_dir, resolved, site)
    is_new = not run_dir.root.exists()
    try:
        run_dir.create()
        run_dir.slurm.mkdir(exist_ok=True)
        write_atomically(run_dir.slurm / "train.sbatch", script)
        write_resolved(run_dir.config, resolved)
        return submit_again(run_dir, flags)
    except OSError as error:
        raise SetupError(f"cannot write the run's directory: {error.strerror}",
                         where=str(run_dir.root), remedy="choose another runs_dir=…") from None
    except ConfigError:
        if is_new:
            shutil.rmtree(run_dir.root)
        raise


def resume(run_dir: RunDir, overrides: Sequence[str]) -> str:
    """Go on with a run by another job; returns its id. Raises: see `submit_again`."""
    if overrides and not active_job(run_dir):
        write_resolved(run_dir.config, resolve_run(run_dir.config, overrides))
    return submit_again(run_dir)


def submit_again(run_dir: RunDir, flags: Sequence[str] = ()) -> str:
    """Submit the kept script: to start the run, or to go on with it.

    Raises:
        RunLockedError: Its job has not ended.
        ConfigError: Slurm does not take the job.
    """
    if job := active_job(run_dir):
        raise RunLockedError(f"{run_dir.root} is being written by Slurm job {job}",
                             where=str(run_dir.slurm / "job"),
                             remedy=f"wait for it, or grpo-megatron cancel {run_dir.root}")
    script = run_dir.slurm / "train.sbatch"
    try:
        job = slurm("sbatch", "--parsable", *flags, str(script)).partition(";")[0]
    except SetupError as error:
        remedy = error.remedy or "change the site's file; submit --dry-run prints the script"
        if "partition" in error.message:
            known = sorted(set(slurm("sinfo", "--noheader", "--format=%R").split()))
            remedy = f"set PARTITION in the site's file; partitions here: {', '.join(known)}"
        raise ConfigError(error.message, where=error.where, remedy=remedy) from None
    write_atomically(run_dir.slurm / "job", job + "\n")
    return job


def job_of(run_dir: RunDir) -> str | None:
    """The run's last job."""
    file = run_dir.slurm / "job"
    return file.read_text().strip() if file.exists() else None


def active_job(run_dir: RunDir) -> str | None:
    """The run's job while it waits or runs."""
    job = job_of(run_dir)
    return job if job and is_active(job) else None


def is_active(job: str) -> bool:
    """Whether Slurm still has the job to run, to end or to start again."""
    return state_of(job).get("JobState") in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED",
                                             "COMPLETING", "REQUEUED")


def state_of(job: str) -> dict[str, str]:
    """What Slurm says of a job (JobState, Reason, Restarts, …); {} if it has forgotten it."""
    try:
        words = slurm("scontrol", "--oneliner", "show", "job", job).partition("\n")[0].split()
    except SetupError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def cancel(run_dir: RunDir, *, now: bool) -> str:
    """End the run's job, with a checkpoint unless `now`; returns the job's id.

    Raises:
        ConfigError: No job of this run waits or runs.
    """
    job = active_job(run_dir)
    if job is None:
        raise ConfigError("no job of this run waits or runs", where=str(run_dir.root),
                          remedy="grpo-megatron status")
    if now or state_of(job).get("JobState") != "RUNNING":
        slurm("scancel", job)
    else:
        slurm("scancel", "--batch", "--signal=INT", job)
    return job


def slurm(*command: str) -> str:
    """Output of a Slurm command. Raises SetupError with its message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SetupError(f"{command[0]} is not here", where="PATH",
                         remedy="run this on a login node of the cluster") from None
    if done.returncode:
        raise SetupError(done.stderr.strip().removeprefix("sbatch: ").removeprefix("error: "),
                         where=" ".join(command))
    return done.stdout.strip()
