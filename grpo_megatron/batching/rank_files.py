"""Files of a recorded step that the data-parallel ranks of its trainer write, each of its samples.

    step_000123/NAME-0.safetensors         `rows` int64 [S] of the table; columns of their tokens
    step_000123/NAME-DOMAIN-0.safetensors  where each domain is trained by itself

Every file has the number of ranks that wrote with it and a digest of its contents, so that a
missing or a damaged one is found. Files that were written before have neither."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from grpo_megatron.batching.columns import read_columns, read_metadata, write_columns
from grpo_megatron.errors import DataError

ROWS = "rows"
_NUM_RANKS = "num_ranks"
_DIGEST = "digest"
_REMEDY = "restore the step from a copy; other steps have files of their own"


def write_rank_file(
    directory: Path,
    name: str,
    rank: int,
    num_ranks: int,
    columns: dict[str, np.ndarray],
    domain: str = "",
) -> None:
    """Write the file of a rank; files of an attempt with more ranks go.

    domain: the one that is trained by itself; "": the whole step is."""
    kind = _kind(name, domain)
    if rank == 0:
        for of_rank, path in _files_of(directory, name).get(kind, {}).items():
            if of_rank >= num_ranks:
                path.unlink()
    facts = {_NUM_RANKS: str(num_ranks), _DIGEST: _digest(str(num_ranks), columns)}
    write_columns(directory / f"{kind}-{rank}.safetensors", columns, metadata=facts)


def read_rank_files(
    directory: Path, name: str, num_rows: int, domain: str | None = None
) -> list[tuple[Path, dict[str, np.ndarray]]]:
    """Return every rank's file and its columns, in order of domains and ranks; empty where nothing
    was recorded. domain: as of `write_rank_file`; None: all files, whatever was trained together.

    Raises DataError where a file is damaged or missing, where they are of several attempts, or
    where their rows are not rows of the table, each once. num_rows: N of the table."""
    found = []
    for kind, files in sorted(_files_of(directory, name).items()):
        if domain is not None and kind != _kind(name, domain):
            continue
        num_ranks_of: dict[int, int | None] = {}
        for rank, path in sorted(files.items()):
            columns = read_columns(path)
            num_ranks_of[rank] = _checked_num_ranks(path, columns)
            found.append((path, columns))
        _require_all_ranks(directory, kind, num_ranks_of)
    first_of: dict[int, Path] = {}
    for path, columns in found:
        for row in _rows_of(path, columns, num_rows):
            if row in first_of:
                raise DataError(
                    f"row {row} is there twice, also in {first_of[row].name}",
                    where=str(path),
                    remedy=_REMEDY,
                )
            first_of[row] = path
    return found


def _kind(name: str, domain: str) -> str:
    if not domain:
        return name
    return f"{name}-{domain}"


def _files_of(directory: Path, name: str) -> dict[str, dict[int, Path]]:
    """Return the files by `NAME` or `NAME-DOMAIN`, then by rank; others, whose names only begin so,
    are none."""
    files: dict[str, dict[int, Path]] = {}
    for path in directory.glob(f"{name}-*.safetensors"):
        kind, _, rank = path.stem.rpartition("-")
        if re.fullmatch("[0-9]+", rank):
            files.setdefault(kind, {})[int(rank)] = path
    return files


def _checked_num_ranks(path: Path, columns: Mapping[str, np.ndarray]) -> int | None:
    """Return how many ranks wrote with this one; None where the file does not say so. Raises
    DataError where its digest is another one."""
    facts = read_metadata(path)
    if not facts:
        return None
    num_ranks = facts.get(_NUM_RANKS, "")
    if facts.get(_DIGEST) != _digest(num_ranks, columns):
        raise DataError(
            "the file is damaged: its digest is not that of its contents",
            where=str(path),
            remedy=_REMEDY,
        )
    return int(num_ranks)


def _digest(num_ranks: str, columns: Mapping[str, np.ndarray]) -> str:
    state = xxhash.xxh3_128(num_ranks.encode())
    for name, values in sorted(columns.items()):
        described = f"{name} {values.dtype.str} {values.shape}".encode()
        state.update(struct.pack("<q", len(described)) + described)
        state.update(values.tobytes())
    return state.hexdigest()


def _rows_of(path: Path, columns: Mapping[str, np.ndarray], num_rows: int) -> list[int]:
    rows = columns.get(ROWS)
    if rows is None or rows.ndim != 1 or rows.dtype != np.int64:
        raise DataError(
            f"the file has no {ROWS!r} int64 [S]; it has: {', '.join(columns) or 'nothing'}",
            where=str(path),
            remedy=_REMEDY,
        )
    if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows:
        raise DataError("the file belongs to another step", where=str(path), remedy=_REMEDY)
    numbers: list[int] = rows.tolist()
    return numbers


def _require_all_ranks(directory: Path, name: str, num_ranks_of: Mapping[int, int | None]) -> None:
    """Raise DataError unless all ranks of one attempt have a file, as far as files say. By rank:
    how many wrote with it."""
    counts = set(num_ranks_of.values())
    if not counts or counts == {None}:
        return
    if len(counts) > 1:
        raise DataError(
            f"files {name!r} are of several attempts", where=str(directory), remedy=_REMEDY
        )
    num_ranks = counts.pop()
    assert num_ranks is not None
    for rank in range(num_ranks):
        if rank not in num_ranks_of:
            raise DataError(
                f"{name}-{rank}.safetensors is missing: {num_ranks} ranks wrote one each",
                where=str(directory),
                remedy=_REMEDY,
            )
