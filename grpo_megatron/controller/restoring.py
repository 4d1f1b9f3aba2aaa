"""Which of a run's checkpoints a resume takes: the newest one that is whole."""

from pathlib import Path

from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.controller.display import show
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.errors import CheckpointError
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.trainer.requests import FindCorruptFiles


async def newest_whole(trainer: TrainerLink, checkpoints: Path, events: Path) -> Path | None:
    """Return the newest `step_…` below `checkpoints` whose files are as they were written; None
    where there is no checkpoint. Damaged ones are named, noted in `events` and passed over.

    Raises CheckpointError where all are damaged."""
    steps = complete_steps(checkpoints)
    for step in reversed(steps):
        directory = checkpoints / f"step_{step:06d}"
        corrupt_files = await trainer.call(FindCorruptFiles(directory))
        if not corrupt_files:
            return directory
        show(
            "message",
            text=f"the checkpoint of step {step} is damaged ({corrupt_files[0]}): "
            "taking the one before it",
        )
        append_event(events, "checkpoint_damaged", step=step, files=corrupt_files)
    if steps:
        raise CheckpointError(
            "every checkpoint of this run is damaged",
            where=str(checkpoints / f"step_{steps[-1]:06d}"),
            remedy="restore one from a backup, or begin again with --overwrite",
        )
    return None
