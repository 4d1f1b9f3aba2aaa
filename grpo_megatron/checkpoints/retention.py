"""Which checkpoints exist, and which may go. Imports neither torch nor Megatron."""

import json
import re
import shutil
from pathlib import Path

DIGESTS = "digests.json"
"""In a checkpoint: size and digest of every other file."""

_STEP = re.compile(r"step_(\d{6,})")


def complete_steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint below `directory`, ascending."""
    found = (_STEP.fullmatch(path.parent.name) for path in directory.glob("step_*/complete.json"))
    return sorted(int(match[1]) for match in found if match)


def sizes_match(directory: Path) -> bool:
    """Whether every file of a checkpoint is there with its size; reads none of them."""
    try:
        files = json.loads((directory / DIGESTS).read_text())
        return all((directory / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, ValueError):
        return False


def prune(directory: Path, keep: int) -> list[int]:
    """Remove checkpoints older than the newest `keep` whole ones, and references that no remaining
    checkpoint names; returns the steps that were removed."""
    steps = {step: directory / f"step_{step:06d}" for step in complete_steps(directory)}
    whole = [step for step, path in steps.items() if sizes_match(path)]
    removed = [step for step in steps if len(whole) >= keep and step < whole[-keep]]
    for step in removed:
        shutil.rmtree(steps.pop(step), ignore_errors=True)
    named = {
        json.loads((path / "complete.json").read_text()).get("reference") for path in steps.values()
    }
    for path in directory.glob("reference_*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
    return removed
