"""Runs that have recorded nothing, which another of their name may replace without a loss."""

from grpo_megatron.files import clear_directory
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.rundir import RunDir

_OF_MIRRORS = ("tensorboard", "wandb")
"""Folders of what copies the metrics, of which there are none."""


def has_recorded_nothing(run_dir: RunDir) -> bool:
    """Whether a run is here that has neither a step, nor samples of one, nor a checkpoint, nor
    anything else that a resume would go on with, and nobody has put a file of their own beside."""
    if not run_dir.has_run:
        return False
    empty = (run_dir.store, run_dir.samples, run_dir.checkpoints)
    expendable = {
        run_dir.lock,
        run_dir.slurm,
        run_dir.root / "logs",
        run_dir.config,
        run_dir.config_history,
        run_dir.events,
        run_dir.stage_record,
        run_dir.metrics_normalisers,
        run_dir.model,
        run_dir.images,
        *(run_dir.root / name for name in ("endpoints", "progress", "rollouts", *_OF_MIRRORS)),
    }
    for path in run_dir.root.iterdir():
        if path == run_dir.metrics:
            is_nothing = path.stat().st_size == 0
        elif path in empty:
            is_nothing = not any(path.iterdir())
        else:
            is_nothing = path in expendable
        if not is_nothing:
            return False
    return True


def clear_unrecorded(run_dir: RunDir) -> None:
    """Remove a run that has recorded nothing, but for its logs and its job; nothing where it has
    recorded something since. RunLockedError where somebody writes it."""
    with run_lock(run_dir):
        if not has_recorded_nothing(run_dir):
            return
        kept = (run_dir.lock, run_dir.slurm, run_dir.root / "logs", run_dir.config)
        run_dir.stage_record.unlink(missing_ok=True)
        clear_directory(run_dir.root, kept)
        run_dir.config.unlink()
