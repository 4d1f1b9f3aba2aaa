"""What a step did to its samples comes back by sample, whoever wrote it."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.columns import write_columns
from grpo_megatron.batching.drift_file import SampleDrift, read_drift, write_drift
from grpo_megatron.errors import DataError

LENGTHS = np.array([3, 0, 5, 9])


def drift_of(row: int) -> SampleDrift:
    values = np.random.default_rng(row).standard_normal((3, LENGTHS[row])).astype(np.float32)
    return SampleDrift(*values)


def test_ranks_and_orders(tmp_path):
    assert read_drift(tmp_path, LENGTHS) == {}
    write_drift(tmp_path, 0, 2, {row: drift_of(row) for row in (3, 1)})
    write_drift(tmp_path, 1, 2, {row: drift_of(row) for row in (2, 0)})
    found = read_drift(tmp_path, LENGTHS)
    assert list(found) == [0, 1, 2, 3]
    for row, sample in found.items():
        for name in ("before", "after", "advantages"):
            wanted = getattr(drift_of(row), name)
            np.testing.assert_array_equal(getattr(sample, name), wanted)


def test_files_of_a_wider_attempt_go(tmp_path):
    for rank in (0, 1, 2):
        write_drift(tmp_path, rank, 3, {rank: drift_of(rank)})
    write_drift(tmp_path, 0, 1, {})
    assert read_drift(tmp_path, LENGTHS) == {}


@pytest.mark.parametrize("lengths", [LENGTHS[:3], LENGTHS + 1])
def test_another_steps_are_refused(tmp_path, lengths):
    write_drift(tmp_path, 0, 1, {3: drift_of(3)})
    with pytest.raises(DataError, match="another step"):
        read_drift(tmp_path, lengths)


@pytest.mark.parametrize("missing", ["rows", "before", "after", "advantages"])
def test_a_file_without_its_columns_is_refused(tmp_path, missing):
    columns = {"rows": np.array([0])}
    for name in ("before", "after", "advantages"):
        columns[name] = np.zeros(3, np.float32)
    path = tmp_path / "drift-0.safetensors"
    write_columns(path, columns)
    assert list(read_drift(tmp_path, LENGTHS)) == [0]
    del columns[missing]
    write_columns(path, columns)
    with pytest.raises(DataError, match=f"the file has no '{missing}'") as caught:
        read_drift(tmp_path, LENGTHS)
    assert caught.value.where == str(path)


def test_log_probs_of_a_rank_that_are_missing_or_damaged_are_found(tmp_path):
    write_drift(tmp_path, 0, 2, {3: drift_of(3)})
    write_drift(tmp_path, 1, 2, {})
    assert list(read_drift(tmp_path, LENGTHS)) == [3]
    path = tmp_path / "drift-0.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="digest"):
        read_drift(tmp_path, LENGTHS)
    path.unlink()
    with pytest.raises(DataError, match=r"drift-0.safetensors is missing"):
        read_drift(tmp_path, LENGTHS)
