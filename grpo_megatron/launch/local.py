"""`train` and `resume`: take the run directory, then start and watch the run's roles."""

import contextlib
import os
from pathlib import Path

from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.gates import refuse_absent_runs
from grpo_megatron.config.history import record_first_settings
from grpo_megatron.config.loader import ResolvedConfig, read_resolved, write_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError, GrpoMegatronError, as_own_error
from grpo_megatron.files import clear_directory, write_atomically
from grpo_megatron.launch.local_gpus import refuse_absent_gpus
from grpo_megatron.launch.resuming import resolve_resumed, settings_unless_refused
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.launch.stage_record import kind_of_merge, tell_changed_stage
from grpo_megatron.launch.steps import SlurmSteps
from grpo_megatron.launch.supervisor import Supervisor
from grpo_megatron.plan.resolve import refuse_cpu_engine, refuse_missing
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event


def train(
    resolved: ResolvedConfig,
    *,
    overwrite: bool = False,
    in_job: bool = False,
    stage_record: str = "",
) -> int:
    """Run a recipe; returns the exit code. ConfigError where the run exists, unless told to
    `overwrite` it, and where the engines of this machine cannot serve it; SetupError where it has
    no GPU and the recipe asks for some.

    stage_record: text of that of the graph's stage that it is, see `stage_record`; empty: of
    none."""
    run_dir = RunDir(resolved.run_path)
    refuse_missing(resolved.config)
    refuse_absent_runs(resolved.config.gates)
    if not in_job:  # a job asks for its GPUs
        refuse_absent_gpus(resolved.config)
    refuse_cpu_engine(resolved.config)
    is_stage = bool(stage_record)
    _refuse_existing(run_dir, overwrite=overwrite, is_stage=is_stage)
    _refuse_unbound(resolved.config)
    with run_lock(run_dir):
        # one that has begun since
        _refuse_existing(run_dir, overwrite=overwrite, is_stage=is_stage)
        _clear(run_dir)
        if stage_record:
            write_atomically(run_dir.stage_record, stage_record)
        return _run(resolved, run_dir, in_job)


def _refuse_existing(run_dir: RunDir, *, overwrite: bool, is_stage: bool) -> None:
    """ConfigError as of `RunDir.refuse_existing`. A graph's stage may also take the place of the
    merge or the export that the graph had under its name."""
    replaces_merge = overwrite and is_stage and kind_of_merge(run_dir) != ""
    run_dir.refuse_existing(overwrite=overwrite, replaces_merge=replaces_merge)


def _clear(run_dir: RunDir) -> None:
    """Remove a run. Killed meanwhile it leaves no stage that could go on, and until the end a run
    that may be replaced."""
    run_dir.stage_record.unlink(missing_ok=True)
    clear_directory(run_dir.root, kept=(run_dir.lock, run_dir.config))
    run_dir.config.unlink(missing_ok=True)


def resume(
    path: Path,
    overrides: list[str],
    *,
    in_job: bool = False,
    skip_reward_check: bool = False,
    stage_record: str = "",
) -> int:
    """Continue a run from its newest complete checkpoint; returns the exit code. ConfigError where
    no run is, which then gets no lock either; raises as `resolve_resumed`, and as `train` does for
    what the recipe names. The run keeps its `config.json` where it does not get as far as to load
    its checkpoint.

    in_job: what the recipe names is left to the controller, as the batch script, which this runs
    in, may be outside of the container that has it. skip_reward_check: so are rewards,
    environments, objective and keys. stage_record: text of that of the graph's stage that goes on,
    which is not at its end whatever its result says; empty: whatever run there is goes on, and
    where it is a stage that gets other settings, says what follows."""
    run_dir = RunDir(path)
    read_resolved(run_dir.config)
    with run_lock(run_dir):
        if stage_record:
            _refuse_another_stage(run_dir, stage_record)
        resolved = resolve_resumed(run_dir, overrides)
        has_checkpoint = bool(complete_steps(run_dir.checkpoints))
        refuse_missing(resolved.config, has_checkpoint=has_checkpoint)
        refuse_absent_runs(resolved.config.gates)
        if not in_job:
            refuse_absent_gpus(resolved.config)
        refuse_cpu_engine(resolved.config)
        if not in_job:  # also what was there before may have changed since
            _refuse_unbound(
                resolved.config,
                skip_reward_check=skip_reward_check,
                has_checkpoint=has_checkpoint,
            )
        record_first_settings(run_dir)
        if stage_record:
            run_dir.result.unlink(missing_ok=True)
        with settings_unless_refused(run_dir, overrides):
            if not stage_record:
                tell_changed_stage(run_dir, resolved)
            return _run(resolved, run_dir, in_job)


def _refuse_another_stage(run_dir: RunDir, record: str) -> None:
    """ConfigError where another process has begun another stage here since it was looked at."""
    file = run_dir.stage_record
    if not file.is_file() or file.read_text(encoding="utf-8") != record:
        raise ConfigError(
            "the stage that was to go on has been replaced meanwhile",
            where=str(run_dir.root),
            remedy="run the graph again",
        )


def _refuse_unbound(
    config: RunConfig, *, skip_reward_check: bool = False, has_checkpoint: bool = False
) -> None:
    """Try what the recipe names outside of itself, before a process starts; see `bindings` and
    `model_files`.

    skip_reward_check: problems and checkpoints only. has_checkpoint: the run goes on after one of
    its own."""
    # imported here: the front end of a cluster, which is outside of the container, lacks what
    # these import
    from grpo_megatron.launch.bindings import refuse_unbound_code, refuse_unfit_data
    from grpo_megatron.launch.model_files import refuse_incomplete_models

    if not skip_reward_check:
        refuse_unbound_code(config)
    refuse_unfit_data(config)
    refuse_incomplete_models(config, has_checkpoint=has_checkpoint)


def _run(resolved: ResolvedConfig, run_dir: RunDir, in_job: bool) -> int:
    write_resolved(run_dir.config, resolved)
    if in_job:
        attempt = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
        return _supervised(Supervisor(SlurmSteps(resolved.config, run_dir.begin(attempt))))
    return _supervised(Supervisor(LocalProcesses(resolved.config, run_dir.begin())))


def _supervised(supervisor: Supervisor) -> int:
    """Run to the end; a failure of any kind is an event too, for `status`."""
    try:
        return supervisor.run()
    except Exception as error:
        told = as_own_error(error, GrpoMegatronError)
        with contextlib.suppress(OSError):  # a full disk may be what it failed of
            append_event(
                supervisor.run_dir.events,
                "failed",
                exit_code=told.exit_code,
                reason=told.message,
            )
        raise
