"""Which checkpoints exist, and which may go. Imports neither torch nor Megatron."""

import json
import re
import shutil
from pathlib import Path

DIGESTS = "digests.json"
"""In a checkpoint: size and digest of every other file."""

_STEP = re.compile(r"step_(\d{6,})")


def complete_steps(directory: Path) -> list[int]:
    """Return the steps with a complete checkpoint below `directory`, ascending."""
    steps = []
    for path in directory.glob("step_*/complete.json"):
        match = _STEP.fullmatch(path.parent.name)
        if match is not None:
            steps.append(int(match[1]))
    return sorted(steps)


def sizes_match(directory: Path) -> bool:
    """Tell whether every file of a checkpoint is there with its size; reads none of them."""
    try:
        files = json.loads((directory / DIGESTS).read_text())
        for name, (num_bytes, _) in files.items():
            if (directory / name).stat().st_size != num_bytes:
                return False
    except (OSError, ValueError):
        return False
    return True


def prune(directory: Path, keep: int) -> list[int]:
    """Remove checkpoints older than the newest `keep` whole ones, and references that no remaining
    checkpoint names. Returns the steps that were removed, ascending."""
    steps = complete_steps(directory)
    whole = [step for step in steps if sizes_match(_of_step(directory, step))]
    oldest_kept = 0
    if len(whole) >= keep:
        oldest_kept = whole[-keep]
    removed = []
    references = set()
    for step in steps:
        checkpoint = _of_step(directory, step)
        if step < oldest_kept:
            shutil.rmtree(checkpoint, ignore_errors=True)
            removed.append(step)
        else:
            state = json.loads((checkpoint / "complete.json").read_text())
            references.add(state.get("reference"))
    for path in directory.glob("reference_*"):
        if path.name not in references:
            shutil.rmtree(path, ignore_errors=True)
    return removed


def _of_step(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"
