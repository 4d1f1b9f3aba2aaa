"""Named arrays in one safetensors file, by memory map: ranks share pages, read what they need."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from safetensors import safe_open
from safetensors.numpy import save

from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.files import open_atomically


def write_columns(
    path: Path,
    columns: Mapping[str, np.ndarray],
    *,
    metadata: dict[str, str] | None = None,
    new: bool = False,
) -> str:
    """Write `columns` durably and atomically; returns the file's checksum.

    metadata: texts by name, for `read_metadata`. Raises FileExistsError where `path` exists and is
    to be `new`."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in columns.items()}
    payload = save(contiguous, metadata)
    checksum = xxhash.xxh3_128_hexdigest(payload)
    with open_atomically(path, new=new) as file:
        file.write(payload)
    return checksum


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Memory-map every array of a file; returns them by name, each in the shape in which it was
    written. Raises DataError when the file is truncated or foreign."""
    columns = {}
    with (
        raised_as(DataError, "unreadable sample file", where=path),
        safe_open(path, "pt") as file,  # as torch tensors; for numpy it copies
    ):
        for name in file.keys():  # noqa: SIM118
            columns[name] = file.get_tensor(name).numpy()
    return columns


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that a file has beside its arrays; empty where it has none. Raises DataError
    as `read_columns` does."""
    with (
        raised_as(DataError, "unreadable sample file", where=path),
        safe_open(path, "pt") as file,
    ):
        return dict(file.metadata() or {})


def file_checksum(path: Path) -> str:
    """Checksum of a whole file, as `write_columns` returns it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
