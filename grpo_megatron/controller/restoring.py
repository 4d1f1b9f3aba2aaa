"""Which of a run's checkpoints a resume takes: the newest one that is whole."""

from pathlib import Path

from grpo_megatron.checkpoints.retention import all_damaged, present_steps, set_aside
from grpo_megatron.controller.display import show
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.trainer.requests import FindCorruptFiles


async def newest_whole(trainer: TrainerLink, checkpoints: Path, events: Path) -> Path | None:
    """Return the newest `step_…` below `checkpoints` whose files are as they were written; None
    where there is no checkpoint. Damaged ones that are newer are named, noted in `events` and set
    aside as `damaged_step_…`: counted as newest they would have whole ones removed.

    Raises CheckpointError where all are damaged, and leaves them as they are."""
    steps = present_steps(checkpoints)
    damaged: list[Path] = []
    for step in reversed(steps):
        directory = checkpoints / f"step_{step:06d}"
        corrupt_files = await trainer.call(FindCorruptFiles(directory))
        if not corrupt_files:
            _set_aside(damaged)
            return directory
        show(
            "message",
            text=f"the checkpoint of step {step} is damaged ({corrupt_files[0]}): "
            "taking the one before it",
        )
        append_event(events, "checkpoint_damaged", step=step, files=corrupt_files)
        damaged.append(directory)
    if damaged:
        raise all_damaged(checkpoints)
    return None


def _set_aside(damaged: list[Path]) -> None:
    for directory in damaged:
        aside = set_aside(directory)
        show("message", text=f"{directory.name} is kept as {aside}, which nothing reads")
