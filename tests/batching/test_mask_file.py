"""Recorded clip and mask decisions come back by sample, whoever wrote them."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.mask_file import read_masks, write_masks
from grpo_megatron.errors import DataError

LENGTHS = np.array([3, 0, 5, 9])


def test_ranks_and_orders(tmp_path):
    flags = np.random.default_rng(0).random(LENGTHS.sum()) < 0.5
    parts = dict(zip(range(4), np.split(flags, np.cumsum(LENGTHS)[:-1]), strict=True))
    for rank, order in enumerate(([3, 1], [2, 0])):
        write_masks(
            tmp_path,
            rank,
            2,
            [(np.array(order), {"low": np.concatenate([parts[row] for row in order])})],
        )
    found = read_masks(tmp_path, LENGTHS)
    np.testing.assert_array_equal(found["low"], flags)


def test_files_of_a_wider_attempt_go(tmp_path):
    for rank in (0, 1, 2):
        write_masks(tmp_path, rank, 3, [(np.array([rank]), {"low": np.ones(LENGTHS[rank], bool)})])
    write_masks(tmp_path, 0, 1, [(np.arange(4), {"low": np.zeros(LENGTHS.sum(), bool)})])
    assert not read_masks(tmp_path, LENGTHS)["low"].any()


def test_the_file_of_the_first_rank_that_is_gone_goes_too(tmp_path):
    for rank, row in ((0, 0), (1, 2), (2, 3)):
        flags = np.ones(LENGTHS[row], bool)
        write_masks(tmp_path, rank, 3, [(np.array([row]), {"low": flags})])
    flags = np.zeros(LENGTHS.sum(), bool)
    write_masks(tmp_path, 0, 2, [(np.arange(4), {"low": flags})])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "decisions-0.safetensors",
        "decisions-1.safetensors",
    ]
    found = read_masks(tmp_path, LENGTHS)["low"]
    assert found.tolist() == [False] * 3 + [True] * 5 + [False] * 9


def test_masks_of_several_micro_batches_keep_their_names(tmp_path):
    """A mask that only one rank knows is empty elsewhere."""
    first = (np.array([2, 0]), {"low": np.array([1, 0, 0, 0, 1, 0, 1, 0], bool)})
    second = (np.array([1]), {"low": np.zeros(0, bool)})
    write_masks(tmp_path, 0, 2, [first, second])
    high = np.array([1] + [0] * 7 + [1], bool)
    write_masks(tmp_path, 1, 2, [(np.array([3]), {"high": high})])
    found = read_masks(tmp_path, LENGTHS)
    assert found["low"].nonzero()[0].tolist() == [1, 3, 7]
    assert found["high"].nonzero()[0].tolist() == [8, 16]


@pytest.mark.parametrize("rows", [[-1, 2], [2, 4]])
def test_rows_outside_of_the_table_are_refused(tmp_path, rows):
    write_masks(tmp_path, 0, 1, [(np.array(rows), {"low": np.ones(5, bool)})])
    with pytest.raises(DataError, match="another step"):
        read_masks(tmp_path, LENGTHS)


@pytest.mark.parametrize("num_flags", [8, 17])
def test_masks_of_other_lengths_are_refused(tmp_path, num_flags):
    write_masks(tmp_path, 0, 1, [(np.array([3]), {"low": np.ones(num_flags, bool)})])
    with pytest.raises(DataError, match=r"low has [13] bytes for 9 tokens"):
        read_masks(tmp_path, LENGTHS)


def test_another_steps_decisions_are_refused(tmp_path):
    write_masks(tmp_path, 0, 1, [(np.array([7]), {"low": np.ones(2, bool)})])
    with pytest.raises(DataError, match="another step"):
        read_masks(tmp_path, LENGTHS)
