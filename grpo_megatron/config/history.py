"""Which settings trained which steps of a run: a resume may change them, and what computes a
recorded step again (`replay`, `mismatch`) needs those of then.

`config_history/step_000003.json` is the `config.json` of the attempt that trained the steps from 3
on, up to the next file's."""

from pathlib import Path

from grpo_megatron.files import open_atomically
from grpo_megatron.rundir import RunDir


def record_settings(run_dir: RunDir, first_step: int) -> None:
    """Record the present `config.json` as what trains the steps from `first_step` on. What trained
    them before is forgotten: they are trained again. A damaged record of steps before stays, for
    those that read its settings to name it."""
    content = run_dir.config.read_bytes()
    for step in _first_steps(run_dir):
        if step >= first_step:
            run_dir.step_settings(step).unlink()
    earlier = settings_of_step(run_dir, first_step)
    # by bytes: a damaged record is no text, and another one than this
    if earlier != run_dir.config and earlier.read_bytes() == content:
        return
    run_dir.config_history.mkdir(exist_ok=True)
    with open_atomically(run_dir.step_settings(first_step)) as file:
        file.write(content)


def record_first_settings(run_dir: RunDir) -> None:
    """Record the present `config.json` as what has trained every step so far, where nothing is
    recorded: an earlier release did not. Call it before that file is replaced."""
    if not _first_steps(run_dir):
        record_settings(run_dir, 0)


def settings_of_step(run_dir: RunDir, step: int) -> Path:
    """Return the file with the settings that trained a step, or that will: `config.json` where
    nothing is recorded of it."""
    before = [first for first in _first_steps(run_dir) if first <= step]
    if not before:
        return run_dir.config
    return run_dir.step_settings(max(before))


def _first_steps(run_dir: RunDir) -> list[int]:
    """Return the steps from which on other settings were recorded, ascending."""
    steps = []
    for path in run_dir.config_history.glob("step_*.json"):
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            steps.append(int(number))
    return sorted(steps)
