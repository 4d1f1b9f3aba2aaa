"""Recorded clip and mask decisions come back by sample, whoever wrote them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.columns import write_columns
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
    for rank, rows in ((0, [0, 1]), (1, [2, 3])):
        flags = np.repeat([row == 2 for row in rows], LENGTHS[rows])
        write_masks(tmp_path, rank, 2, [(np.array(rows), {"low": flags})])
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


def write_both_ranks(directory) -> np.ndarray:
    """Masks of two ranks; returns them in the order of the table."""
    flags = np.random.default_rng(1).random(LENGTHS.sum()) < 0.5
    parts = np.split(flags, np.cumsum(LENGTHS)[:-1])
    for rank, rows in enumerate(([3, 1], [2, 0])):
        of_rank = np.concatenate([parts[row] for row in rows])
        write_masks(directory, rank, 2, [(np.array(rows), {"low": of_rank})])
    return flags


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bit_that_has_changed_is_found(tmp_path, data):
    """Or it changes nothing: blanks at the end of the header may be any."""
    flags = write_both_ranks(tmp_path)
    path = tmp_path / f"decisions-{data.draw(st.sampled_from([0, 1]))}.safetensors"
    damaged = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        found = read_masks(tmp_path, LENGTHS)
    except DataError:
        return
    np.testing.assert_array_equal(found["low"], flags)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_masks_of_a_rank_that_are_missing_are_found(tmp_path, rank):
    write_both_ranks(tmp_path)
    (tmp_path / f"decisions-{rank}.safetensors").unlink()
    with pytest.raises(DataError, match=f"decisions-{rank}.safetensors is missing: 2 ranks"):
        read_masks(tmp_path, LENGTHS)


def test_masks_of_several_attempts_are_refused(tmp_path):
    write_both_ranks(tmp_path)
    write_masks(tmp_path, 1, 3, [(np.array([2, 0]), {"low": np.zeros(8, bool)})])
    with pytest.raises(DataError, match="of several attempts"):
        read_masks(tmp_path, LENGTHS)


def write_old_masks(directory, rank: int, **columns: np.ndarray) -> None:
    """As they were written before: without a digest and the number of ranks."""
    write_columns(directory / f"decisions-{rank}.safetensors", columns)


def test_masks_of_older_stores_are_read_and_checked(tmp_path):
    bits = np.array([0b10100000], np.uint8)
    write_old_masks(tmp_path, 0, rows=np.array([0]), low=bits)
    write_old_masks(tmp_path, 1, rows=np.array([2]), low=bits)
    assert read_masks(tmp_path, LENGTHS)["low"].nonzero()[0].tolist() == [0, 2, 3, 5]
    write_old_masks(tmp_path, 1, rows=np.array([0]), low=bits)
    with pytest.raises(DataError, match=r"row 0 is there twice, also in decisions-0"):
        read_masks(tmp_path, LENGTHS)
    write_old_masks(tmp_path, 1, rowt=np.array([2]), low=bits)
    with pytest.raises(DataError, match="the file has no 'rows'"):
        read_masks(tmp_path, LENGTHS)
    write_old_masks(tmp_path, 1, rows=np.array([2]), low=bits.astype(np.float32))
    with pytest.raises(DataError, match="low has 4 bytes for 5 tokens"):
        read_masks(tmp_path, LENGTHS)


def test_files_that_are_of_no_rank_are_left_alone(tmp_path):
    flags = write_both_ranks(tmp_path)
    (tmp_path / "decisions-1.old.safetensors").write_text("kept by hand")
    np.testing.assert_array_equal(read_masks(tmp_path, LENGTHS)["low"], flags)
    write_both_ranks(tmp_path)
    assert (tmp_path / "decisions-1.old.safetensors").exists()


def test_each_domain_that_is_trained_by_itself_has_files(tmp_path):
    """Also one that has the name of a rank's file; the files of one leave those of others alone."""
    flags = np.random.default_rng(1).random(LENGTHS.sum()) < 0.5
    parts = np.split(flags, np.cumsum(LENGTHS)[:-1])
    for domain, row in (("math", 0), ("math-1", 2), ("1", 3)):
        for rank, rows in ((0, [row]), (1, [])):
            mask = np.concatenate([np.zeros(0, bool), *(parts[number] for number in rows)])
            write_masks(tmp_path, rank, 2, [(np.array(rows, np.int64), {"low": mask})], domain)
    write_masks(tmp_path, 0, 1, [(np.array([0]), {"low": parts[0]})], "math")
    assert not (tmp_path / "decisions-math-1.safetensors").exists()
    assert (tmp_path / "decisions-math-1-1.safetensors").exists()
    np.testing.assert_array_equal(read_masks(tmp_path, LENGTHS)["low"], flags)
    (tmp_path / "decisions-1-1.safetensors").unlink()
    with pytest.raises(DataError, match=r"decisions-1-1.safetensors is missing: 2 ranks"):
        read_masks(tmp_path, LENGTHS)


def test_no_file_is_another_thing_than_no_mask(tmp_path):
    assert read_masks(tmp_path, LENGTHS) is None
    write_masks(tmp_path, 0, 1, [(np.arange(4), {})], "math")
    assert read_masks(tmp_path, LENGTHS, "math") == {}
    assert read_masks(tmp_path, LENGTHS, "code") is None
    assert read_masks(tmp_path, LENGTHS, "") is None
