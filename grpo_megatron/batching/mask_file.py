"""Which tokens were clipped or rejected when a step was trained: optional files of a recorded step.

    step_000123/decisions-0.safetensors  `rows` int64 [S]; per name, packed bits of their tokens

The trainer writes one for each data-parallel rank; a replay follows them. The files are called
decisions, as in stores that were written before."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.columns import read_columns, write_columns
from grpo_megatron.batching.ragged import concatenate, offsets
from grpo_megatron.errors import DataError


def write_masks(
    directory: Path,
    rank: int,
    num_ranks: int,
    found: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]],
) -> None:
    """Write which tokens a rank clipped or rejected, to be replayed at another layout, where
    rounding may decide otherwise.

    found: of every micro-batch, table rows int64 [S], and masks bool [n] by name."""
    if rank == 0:  # an earlier attempt may have had more ranks
        for path in directory.glob("decisions-*.safetensors"):
            if int(path.stem.partition("-")[2]) >= num_ranks:
                path.unlink()
    rows_of: list[np.ndarray] = []
    masks_of: dict[str, list[np.ndarray]] = {}
    for rows, masks in found:
        rows_of.append(rows)
        for name, mask in masks.items():
            masks_of.setdefault(name, []).append(mask)
    columns = {}
    for name, parts in masks_of.items():
        columns[name] = np.packbits(np.concatenate(parts))
    columns["rows"] = concatenate(rows_of, np.int64)
    write_columns(directory / f"decisions-{rank}.safetensors", columns)


def read_masks(directory: Path, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return the masks of the whole step in the order of its table, bool [n] by name.

    Raises DataError when they belong to another step. lengths: policy tokens, int64 [N]."""
    starts = offsets(lengths)
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("decisions-*.safetensors")):
        columns = read_columns(path)
        rows = columns.pop("rows")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(lengths):
            raise DataError("decisions belong to another step", where=str(path))
        index = concatenate([np.arange(*starts[row : row + 2]) for row in rows], np.int64)
        for name, packed in columns.items():
            if len(packed) != math.ceil(len(index) / 8):
                raise DataError(
                    f"{name} has {len(packed)} bytes for {len(index)} tokens", where=str(path)
                )
            mask = found.setdefault(name, np.zeros(starts[-1], bool))
            mask[index] = np.unpackbits(packed, count=len(index)).astype(bool)
    return found
