"""Which checkpoint a resume takes, and what becomes of damaged ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from grpo_megatron.checkpoints.retention import complete_steps, present_steps
from grpo_megatron.controller.restoring import newest_whole
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.requests import FindCorruptFiles


class Trainer:
    """Says of checkpoints with a file `corrupt`, or without their mark, that they are damaged."""

    async def call(self, request: FindCorruptFiles) -> list[str]:
        directory = request.directory
        if (directory / "corrupt").exists() or not (directory / "complete.json").exists():
            return [f"{directory.name}/weights"]
        return []


def write(run: Path, step: int, *, corrupt: bool = False, has_mark: bool = True) -> None:
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    if has_mark:
        (checkpoint / "complete.json").write_text("{}")
    if corrupt:
        (checkpoint / "corrupt").touch()


def restore(run: Path) -> Path | None:
    found = newest_whole(Trainer(), run / "checkpoints", run / "events.jsonl")
    return asyncio.run(found)


def noted(run: Path) -> list[int]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_damaged_ones_are_passed_over_noted_and_set_aside(tmp_path):
    write(tmp_path, 1, corrupt=True)
    write(tmp_path, 2)
    write(tmp_path, 3, has_mark=False)
    write(tmp_path, 4, corrupt=True)
    checkpoints = tmp_path / "checkpoints"
    assert restore(tmp_path) == checkpoints / "step_000002"
    assert noted(tmp_path) == [4, 3]
    assert present_steps(checkpoints) == [1, 2]  # what is older stays for those that look there
    assert (checkpoints / "damaged_step_000004/corrupt").exists()
    assert (checkpoints / "damaged_step_000003").is_dir()
    assert restore(tmp_path) == checkpoints / "step_000002" and noted(tmp_path) == [4, 3]


def test_where_all_are_damaged_nothing_is_moved(tmp_path):
    """A second resume would find no checkpoint then, and begin with the first step."""
    write(tmp_path, 2, corrupt=True)
    write(tmp_path, 4, has_mark=False)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="every checkpoint") as refused:
            restore(tmp_path)
        assert refused.value.where == str(tmp_path / "checkpoints/step_000004")
    assert complete_steps(tmp_path / "checkpoints") == [2]


def test_a_run_that_saved_none_begins(tmp_path):
    (tmp_path / "checkpoints/cold_start").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000002.tmp").mkdir()
    assert restore(tmp_path) is None
