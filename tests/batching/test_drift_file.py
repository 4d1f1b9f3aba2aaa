"""What a step did to its samples comes back by sample, whoever wrote it."""

from __future__ import annotations

import numpy as np
import pytest

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
