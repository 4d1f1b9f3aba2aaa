"""Which checkpoints go: those older than the newest whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.checkpoints.retention import complete_steps, prune


def write(directory: Path, step: int, *, recorded_size: int = 3) -> None:
    """A complete checkpoint with a file of 3 bytes, of which as many are recorded."""
    checkpoint = directory / f"step_{step:06d}"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"abc")
    (checkpoint / "digests.json").write_text(json.dumps({"weights": [recorded_size, "digest"]}))
    (checkpoint / "complete.json").write_text("{}")


@pytest.mark.parametrize("recorded_size", [2, 4])
def test_the_newest_whole_checkpoint_stays_behind_a_damaged_one(tmp_path, recorded_size):
    write(tmp_path, 1)
    write(tmp_path, 2, recorded_size=recorded_size)
    assert prune(tmp_path, keep=1) == []
    assert complete_steps(tmp_path) == [1, 2]


def test_a_damaged_one_goes_once_there_are_enough_whole_ones(tmp_path):
    write(tmp_path, 1, recorded_size=4)
    write(tmp_path, 2)
    assert prune(tmp_path, keep=2) == []
    write(tmp_path, 3)
    assert prune(tmp_path, keep=2) == [1]
    assert complete_steps(tmp_path) == [2, 3]
