"""Which checkpoints exist, and which may go. Imports neither torch nor Megatron."""

import json
import re
from pathlib import Path
from typing import Any

from grpo_megatron.errors import CheckpointError
from grpo_megatron.files import remove_directory, replace_directory

DIGESTS = "digests.json"
"""In a checkpoint: size and digest of every other file."""
COMPLETE = "complete.json"
"""In a checkpoint: what was saved beside the weights. Without it the checkpoint is not complete."""
UNFINISHED = ".partial"
"""What the name of a Hugging Face checkpoint ends with while it is being written."""
WEIGHTS_FOLDER = "weights"
"""In a checkpoint: model and optimizer."""
ADAPTERS_FOLDER = "adapters"
"""In a checkpoint: a folder for every domain that has adapters of its own."""

_STEP = re.compile(r"step_(\d{6,})")


def present_steps(directory: Path) -> list[int]:
    """Return the steps with a checkpoint below `directory`, also a damaged one, ascending: it gets
    its name when it is whole."""
    steps = []
    for path in directory.glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match is not None and path.is_dir():
            steps.append(int(match[1]))
    return sorted(steps)


def complete_steps(directory: Path) -> list[int]:
    """Return the steps with a complete checkpoint below `directory`, ascending."""
    steps = present_steps(directory)
    return [step for step in steps if (_of_step(directory, step) / COMPLETE).is_file()]


def is_torch_dist(directory: Path) -> bool:
    """Tell whether `directory` is a checkpoint of ours with distributed weights."""
    return (directory / WEIGHTS_FOLDER / ".metadata").exists()


def all_damaged(directory: Path) -> CheckpointError:
    """Return what to raise where there are checkpoints below `directory`, and none is whole."""
    newest = _of_step(directory, present_steps(directory)[-1])
    return CheckpointError(
        "every checkpoint of this run is damaged",
        where=str(newest),
        remedy="restore one from a backup, or begin again with --overwrite",
    )


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to `damaged_step_…`, which nothing counts and nothing removes;
    returns where it is."""
    aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
    replace_directory(checkpoint, aside)
    return aside


def sizes_match(directory: Path) -> bool:
    """Tell whether every file of a checkpoint is there with its size; reads none of them."""
    if not (directory / COMPLETE).is_file():
        return False
    try:
        for name, (num_bytes, _) in _read_table(directory / DIGESTS).items():
            if (directory / name).stat().st_size != num_bytes:
                return False
    except (OSError, ValueError, TypeError):
        return False
    return True


def prune(directory: Path, keep: int) -> list[int]:
    """Remove checkpoints older than the newest `keep` whole ones, and references that no remaining
    checkpoint names. Returns the steps that were removed, ascending."""
    steps = present_steps(directory)
    whole = [step for step in steps if sizes_match(_of_step(directory, step))]
    oldest_kept = 0
    if len(whole) >= keep:
        oldest_kept = whole[-keep]
    removed = []
    references = set()
    for step in steps:
        checkpoint = _of_step(directory, step)
        if step < oldest_kept:
            remove_directory(checkpoint)
            removed.append(step)
        else:
            references.add(_reference_of(checkpoint))
    for path in directory.glob("reference_*"):
        if path.name not in references:
            remove_directory(path)
    return removed


def _of_step(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def _reference_of(checkpoint: Path) -> str | None:
    """Return the name of the reference beside a checkpoint that it goes on with; None without one,
    and of a checkpoint that is damaged: nothing can go on with it."""
    try:
        name = _read_table(checkpoint / COMPLETE).get("reference")
    except (OSError, ValueError):
        return None
    if isinstance(name, str):
        return name
    return None


def _read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError where the file holds something else."""
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is no table")
    return values
