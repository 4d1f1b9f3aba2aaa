"""What a resume may change of a run, and what it may not."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_megatron.checkpoints.fitting import newest_record, refuse_unfitting
from grpo_megatron.checkpoints.retention import all_damaged, present_steps
from grpo_megatron.config.loader import ResolvedConfig, read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError, GrpoMegatronError
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.stage_record import put_back_stage, text_of_stage
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import SETTINGS_TAKEN, read_events

_TAKEN = (SETTINGS_TAKEN, "cold_start_resumed")


def resolve_resumed(run_dir: RunDir, overrides: Sequence[str]) -> ResolvedConfig:
    """Return the configuration with which a run goes on. Raises as `resolve_run`; ConfigError also
    where its name or runs_dir would be those of another directory, CheckpointError where its newest
    checkpoint does not fit, or all of them are damaged."""
    resolved = resolve_run(run_dir.config, overrides)
    _refuse_another_place(run_dir, resolved)
    newest = _newest_checkpoint(run_dir, resolved.config)
    if newest is not None:
        directory, record = newest
        is_cold = directory.parent == run_dir.cold_start_checkpoints
        refuse_unfitting(resolved.config, record, directory, is_cold=is_cold)
        if not is_cold:
            num_trained = int(directory.name.removeprefix("step_"))
            _refuse_another_course(run_dir, resolved.config, num_trained)
    return resolved


def _refuse_another_course(run_dir: RunDir, config: RunConfig, num_trained: int) -> None:
    """ConfigError for fewer steps than are trained, and for another seed where some are: by it the
    prompts of all steps are drawn."""
    if config.num_steps < num_trained:
        raise ConfigError(
            f"num_steps = {config.num_steps}, and {num_trained} steps are trained",
            where="num_steps",
            remedy=f"set num_steps to {num_trained} or more; of earlier checkpoints that are kept, "
            "`grpo-megatron convert to-hf` makes a model",
        )
    seed = read_resolved(run_dir.config).config.seed
    if num_trained and config.seed != seed:
        raise ConfigError(
            f"seed = {config.seed}, and the prompts of a run are drawn by the seed with which it "
            f"began, {seed}",
            where="seed",
            remedy=f"leave seed at {seed}, or train another run",
        )


@contextmanager
def settings_unless_refused(run_dir: RunDir, overrides: Sequence[str]) -> Iterator[None]:
    """Keep what the block writes into a run's config.json, unless the block ends before its
    processes have taken it: then the file is as it was, and who resumed is told so.

    A run without a checkpoint has nothing that could refuse settings, and keeps them."""
    before = run_dir.config.read_text(encoding="utf-8")
    stage_before = text_of_stage(run_dir)
    has_checkpoint = _newest_checkpoint(run_dir, read_resolved(run_dir.config).config) is not None
    num_events = len(read_events(run_dir.events))

    def put_back() -> str:
        """Undo what was not taken; returns what to tell, empty where nothing was undone."""
        events = read_events(run_dir.events)[num_events:]
        is_taken = any(event["kind"] in _TAKEN for event in events)
        is_changed = run_dir.config.read_text(encoding="utf-8") != before
        if is_taken or not has_checkpoint or not is_changed:
            return ""
        write_atomically(run_dir.config, before)
        put_back_stage(run_dir, stage_before)
        if not overrides:  # an older file was only written anew
            return ""
        return f"config.json is as it was, without {shlex.join(overrides)}"

    try:
        yield
    except BaseException as error:
        told = put_back()
        if told and isinstance(error, GrpoMegatronError):
            if error.remedy:
                told = f"{error.remedy}; {told}"
            error.remedy = told
        raise
    told = put_back()
    if told:
        print(told, file=sys.stderr, flush=True)


def _newest_checkpoint(run_dir: RunDir, config: RunConfig) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint with which the run goes on, unless it is damaged; see
    `newest_record`. Raises CheckpointError where no checkpoint says what it is."""
    folders = [run_dir.checkpoints]
    if config.cold_start is not None:
        folders.append(run_dir.cold_start_checkpoints)
    for checkpoints in folders:
        newest = newest_record(checkpoints)
        if newest is not None:
            return newest
        if present_steps(checkpoints):
            raise all_damaged(checkpoints)
    return None


def _refuse_another_place(run_dir: RunDir, resolved: ResolvedConfig) -> None:
    """ConfigError for another name or runs_dir than the run's, unless they say where it is now."""
    old = read_resolved(run_dir.config)
    if resolved.run_path in (old.run_path, run_dir.root):
        return
    if resolved.run_path.resolve() == run_dir.root.resolve():
        return
    first_export, *_ = run_dir.exports(old.config.adapter_domains)
    export = shlex.quote(str(first_export))
    raise ConfigError(
        f"a run that is resumed stays where it is, and not in {resolved.run_path}",
        where="overrides",
        remedy=f"leave out name=… and runs_dir=…, which are those of {old.run_path}; or train "
        f"another run with model.path={export}",
    )
