"""Which tokens were clipped or rejected when a step was trained: optional files of a recorded step.

    step_000123/decisions-0.safetensors  `rows` int64 [S]; per name, packed bits of their tokens

The trainer writes one for each data-parallel rank (`batching.rank_files`); a replay follows them.
The files are called decisions, as in stores that were written before."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.ragged import concatenate, offsets
from grpo_megatron.batching.rank_files import ROWS, read_rank_files, write_rank_file
from grpo_megatron.errors import DataError

_NAME = "decisions"


def write_masks(
    directory: Path,
    rank: int,
    num_ranks: int,
    found: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]],
    domain: str = "",
) -> None:
    """Write which tokens a rank clipped or rejected, to be replayed at another layout, where
    rounding may decide otherwise.

    found: of every micro-batch, rows of the step's table int64 [S], and masks bool [n] by name.
    domain: the one that is trained by itself; "": the whole step is."""
    rows_of: list[np.ndarray] = []
    masks_of: dict[str, list[np.ndarray]] = {}
    for rows, masks in found:
        rows_of.append(rows)
        for name, mask in masks.items():
            masks_of.setdefault(name, []).append(mask)
    columns = {}
    for name, parts in masks_of.items():
        columns[name] = np.packbits(np.concatenate(parts))
    columns[ROWS] = concatenate(rows_of, np.int64)
    write_rank_file(directory, _NAME, rank, num_ranks, columns, domain)


def read_masks(
    directory: Path, lengths: np.ndarray, domain: str | None = None
) -> dict[str, np.ndarray] | None:
    """Return the masks of the whole step in the order of its table, bool [n] by name; those of a
    domain that is trained by itself, with no token of others, or "" for a step that is trained
    together. None where no file is there.

    Raises DataError when they belong to another step, or a file is damaged or missing. lengths:
    policy tokens, int64 [N]."""
    starts = offsets(lengths)
    files = read_rank_files(directory, _NAME, len(lengths), domain)
    if not files:
        return None
    found: dict[str, np.ndarray] = {}
    for path, columns in files:
        rows = columns.pop(ROWS)
        index = concatenate([np.arange(*starts[row : row + 2]) for row in rows], np.int64)
        for name, packed in columns.items():
            if packed.dtype != np.uint8 or packed.shape != (math.ceil(len(index) / 8),):
                raise DataError(
                    f"{name} has {packed.nbytes} bytes for {len(index)} tokens", where=str(path)
                )
            mask = found.setdefault(name, np.zeros(starts[-1], bool))
            mask[index] = np.unpackbits(packed, count=len(index)).astype(bool)
    return found
