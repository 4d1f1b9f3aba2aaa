"""Recorded clip and mask decisions come back by sample, whoever wrote them."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.store import read_decisions, write_decisions
from grpo_megatron.errors import DataError

LENGTHS = np.array([3, 0, 5, 9])


def test_ranks_and_orders(tmp_path):
    flags = np.random.default_rng(0).random(LENGTHS.sum()) < 0.5
    parts = dict(zip(range(4), np.split(flags, np.cumsum(LENGTHS)[:-1]), strict=True))
    for rank, order in enumerate(([3, 1], [2, 0])):
        write_decisions(
            tmp_path,
            rank,
            2,
            [(np.array(order), {"low": np.concatenate([parts[row] for row in order])})],
        )
    found = read_decisions(tmp_path, LENGTHS)
    np.testing.assert_array_equal(found["low"], flags)


def test_files_of_a_wider_attempt_go(tmp_path):
    for rank in (0, 1, 2):
        write_decisions(
            tmp_path, rank, 3, [(np.array([rank]), {"low": np.ones(LENGTHS[rank], bool)})]
        )
    write_decisions(tmp_path, 0, 1, [(np.arange(4), {"low": np.zeros(LENGTHS.sum(), bool)})])
    assert not read_decisions(tmp_path, LENGTHS)["low"].any()


def test_another_steps_decisions_are_refused(tmp_path):
    write_decisions(tmp_path, 0, 1, [(np.array([7]), {"low": np.ones(2, bool)})])
    with pytest.raises(DataError, match="another step"):
        read_decisions(tmp_path, LENGTHS)
