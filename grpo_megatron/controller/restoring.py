"""Which of a run's checkpoints a resume takes: the newest one that is whole."""

from pathlib import Path

from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.controller.display import show
from grpo_megatron.controller.session import Session
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.requests import FindCorruptFiles


async def newest_whole(session: Session, checkpoints: Path) -> Path | None:
    """Return the newest `step_…` below `checkpoints` whose files are as they were written; None
    where there is no checkpoint. Damaged ones are named and passed over.

    Raises CheckpointError where all are damaged."""
    steps = complete_steps(checkpoints)
    for step in reversed(steps):
        directory = checkpoints / f"step_{step:06d}"
        files = await session.trainer.call(FindCorruptFiles(directory))
        if not files:
            return directory
        show(
            "message",
            text=f"the checkpoint of step {step} is damaged ({files[0]}): taking the one before it",
        )
        session.event("checkpoint_damaged", step=step, files=files)
    if steps:
        raise CheckpointError(
            "every checkpoint of this run is damaged",
            where=str(checkpoints / f"step_{steps[-1]:06d}"),
            remedy="restore one from a backup, or begin again with --overwrite",
        )
    return None
