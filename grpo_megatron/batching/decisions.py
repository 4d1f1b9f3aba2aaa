"""What the trainer decided about each token of a recorded step: clipped, rejected.

Written beside the step's samples by every data-parallel rank for its own samples, so that a step
can be computed again at another layout, where rounding may decide otherwise at a bound.

    step_000123/decisions-0.safetensors   rows int64 [S]; per name, packed bits of their tokens
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.columns import read_columns, write_columns
from grpo_megatron.errors import DataError


def write_decisions(directory: Path, rank: int, num_ranks: int,
                    found: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> None:
    """found: of every micro-batch its table rows, int64 [S], and flags of its tokens, bool [n]."""
    if rank == 0:  # an earlier attempt may have had more ranks
        for path in directory.glob("decisions-*.safetensors"):
            if int(path.stem.partition("-")[2]) >= num_ranks:
                path.unlink()
    names = dict.fromkeys(name for _, flags in found for name in flags)
    columns = {name: np.packbits(np.concatenate([flags[name] for _, flags in found]))
               for name in names}
    columns["rows"] = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in found)])
    write_columns(directory / f"decisions-{rank}.safetensors", columns)


def read_decisions(directory: Path, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Decisions of the whole step in the order of its table, bool [n] by name.

    Raises DataError when they belong to another step. lengths: of completions, int64 [N]."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("decisions-*.safetensors")):
        columns = read_columns(path)
        rows = columns.pop("rows")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(lengths):
            raise DataError("decisions belong to another step", where=str(path))
        index = np.concatenate([np.empty(0, np.int64), *(np.arange(starts[row], starts[row + 1])
                                                         for row in rows)])
        for name, packed in columns.items():
            if len(packed) != -(-len(index) // 8):
                raise DataError(f"{name} has {len(packed)} bytes for {len(index)} tokens",
                                where=str(path))
            flags = found.setdefault(name, np.zeros(starts[-1], bool))
            flags[index] = np.unpackbits(packed, count=len(index)).astype(bool)
    return found
