"""Which checkpoints exist, and which may go. Imports neither torch nor Megatron."""

import json
import re
import shutil
from pathlib import Path

_STEP = re.compile(r"step_(\d{6,})")


def complete_steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint below `directory`, ascending."""
    if not directory.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(int(m[1]) for m, path in found if m and (path / "complete.json").exists())


def prune(directory: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` complete checkpoints, and reference weights that none of
    these names; returns the removed steps."""
    steps = complete_steps(directory)
    removed = steps[:-keep]
    for step in removed:
        shutil.rmtree(directory / f"step_{step:06d}", ignore_errors=True)
    named = {json.loads((directory / f"step_{step:06d}" / "complete.json").read_text()).get(
        "reference") for step in steps[-keep:]}
    for path in directory.glob("reference_*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
    return removed
