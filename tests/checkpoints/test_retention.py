"""Which checkpoints go: those older than the newest whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.checkpoints.retention import (
    complete_steps,
    present_steps,
    prune,
    set_aside,
    sizes_match,
)

DAMAGED_TABLES = ["", "null", "[1]", "3", '{"weights": null}', "[" * 200_000, "\udcff"]


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


def test_a_checkpoint_without_its_mark_is_there_but_does_not_count(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step_000002/complete.json").unlink()
    (tmp_path / "step_000003.tmp").mkdir()
    (tmp_path / "step_000004").write_text("no directory")
    assert present_steps(tmp_path) == [1, 2] and complete_steps(tmp_path) == [1]
    assert prune(tmp_path, keep=1) == []
    write(tmp_path, 3)
    assert prune(tmp_path, keep=1) == [1, 2]


@pytest.mark.parametrize("text", DAMAGED_TABLES)
@pytest.mark.parametrize("name", ["complete.json", "digests.json"])
def test_a_damaged_table_of_a_checkpoint_keeps_no_other_from_going(tmp_path, name, text):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_000002" / name).write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "step_000001/complete.json").write_text('{"reference": "reference_step_1"}')
    for number in (1, 2):
        (tmp_path / f"reference_step_{number}").mkdir()
    prune(tmp_path, keep=3)
    assert present_steps(tmp_path) == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("reference_*")] == ["reference_step_1"]
    if name == "digests.json":
        assert not sizes_match(tmp_path / "step_000002")
    prune(tmp_path, keep=1)
    assert present_steps(tmp_path) == [3]


def test_what_was_set_aside_has_no_whole_one_removed(tmp_path):
    """It was newer: counted, it would be the one that is kept."""
    write(tmp_path, 2)
    write(tmp_path, 4)
    aside = set_aside(tmp_path / "step_000004")
    write(tmp_path, 3)
    assert prune(tmp_path, keep=1) == [2]
    assert present_steps(tmp_path) == [3]
    assert (aside / "weights").read_bytes() == b"abc" and aside.name == "damaged_step_000004"
    write(tmp_path, 4)
    set_aside(tmp_path / "step_000004")  # the same step, damaged again
