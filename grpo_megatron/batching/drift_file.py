"""What the optimizer steps of a recorded step did to some of its samples: an optional file.

    step_000123/drift-0.safetensors  `rows` int64 [S]; `before`, `after`, `advantages` float32 [n]

The trainer writes it for `objective.monitor_share` of the samples once it has trained the step,
one file for each data-parallel rank (`batching.rank_files`), beside what is immutable. Only reports
read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_megatron.batching.rank_files import ROWS, read_rank_files, write_rank_file
from grpo_megatron.errors import DataError

_NAME = "drift"
_COLUMNS = ("before", "after", "advantages")


@dataclass(frozen=True, slots=True)
class SampleDrift:
    """One sample; all float32, of the tokens that the policy sampled."""

    before: np.ndarray
    """Log-probs of its tokens under the policy before the first optimizer step of the batch."""
    after: np.ndarray
    """Log-probs after the last one."""
    advantages: np.ndarray
    """As they were trained; 0 where the sample is not in the loss."""


def write_drift(
    directory: Path, rank: int, num_ranks: int, found: Mapping[int, SampleDrift], domain: str = ""
) -> None:
    """Write what a rank saw, by row of the step's table; files of an attempt with more ranks go.

    domain: the one that is trained by itself; "": the whole step is."""
    columns = {ROWS: np.array(list(found), np.int64)}
    for name in _COLUMNS:
        parts = [np.empty(0, np.float32)]
        for sample in found.values():
            parts.append(np.asarray(getattr(sample, name), np.float32))
        columns[name] = np.concatenate(parts)
    write_rank_file(directory, _NAME, rank, num_ranks, columns, domain)


def read_drift(directory: Path, lengths: np.ndarray) -> dict[int, SampleDrift]:
    """Read the samples that were looked at, by row in ascending order; empty where nothing was
    recorded.

    Raises DataError when it belongs to another step, or a file is damaged or missing. lengths:
    policy tokens, int64 [N]."""
    found: dict[int, SampleDrift] = {}
    for path, columns in read_rank_files(directory, _NAME, len(lengths)):
        rows = columns[ROWS]
        num_tokens = int(lengths[rows].sum())
        for name in _COLUMNS:
            if name not in columns:
                raise DataError(f"the file has no {name!r} of its tokens", where=str(path))
            if columns[name].shape != (num_tokens,):
                raise DataError("log-probs belong to another step", where=str(path))
        start = 0
        for row in rows.tolist():
            end = start + int(lengths[row])
            found[row] = SampleDrift(
                columns["before"][start:end],
                columns["after"][start:end],
                columns["advantages"][start:end],
            )
            start = end
    return dict(sorted(found.items()))
