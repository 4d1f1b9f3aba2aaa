"""`train` and `resume`: take the run directory, then supervise the run's roles."""

import shutil
from pathlib import Path

from grpo_megatron.config.resolved import ResolvedConfig, write_resolved
from grpo_megatron.errors import ConfigError
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.launch.steps import SlurmSteps, attempt_of_job
from grpo_megatron.launch.supervisor import Supervisor
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir


def train(resolved: ResolvedConfig, *, overwrite: bool = False, in_job: bool = False) -> int:
    """Start a new run; returns the exit code.

    Args:
        in_job: Start its roles as steps of the Slurm job around this process.

    Raises:
        ConfigError: the run directory exists and `overwrite` is off.
    """
    run_dir = RunDir(resolved.run_path)
    if run_dir.config.exists() and not overwrite:
        raise ConfigError(f"run {resolved.config.name!r} exists", where=str(run_dir.root),
                          remedy=f"continue it with `grpo-megatron resume {run_dir.root}`, choose "
                                 "another name=…, or replace it with --overwrite")
    run_dir.root.mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir):
        _empty(run_dir)
        return _run(resolved, run_dir, in_job)


def resume(path: Path, overrides: list[str], *, in_job: bool = False) -> int:
    """Continue a run from its newest complete checkpoint; returns the exit code."""
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        raise ConfigError("not a run directory: config.json is missing", where=str(path))
    with run_lock(run_dir):
        return _run(resolve_run(run_dir.config, overrides), run_dir, in_job)


def _run(resolved: ResolvedConfig, run_dir: RunDir, in_job: bool) -> int:
    write_resolved(run_dir.config, resolved)
    run_dir = run_dir.begin(attempt_of_job() if in_job else "")
    make_roles = SlurmSteps if in_job else LocalProcesses
    return Supervisor(make_roles(resolved.config, run_dir)).run()


def _empty(run_dir: RunDir) -> None:
    """Remove what an earlier run of this name left; keep the lock, which is held."""
    for path in run_dir.root.iterdir():
        if path != run_dir.lock:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
