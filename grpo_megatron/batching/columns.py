"""Named arrays in one safetensors file, written atomically and read by memory map.

safetensors' own readers copy; ranks share one page cache here and touch only the rows they need.
Format: 8-byte little-endian header length, JSON header, raw bytes
(https://huggingface.co/docs/safetensors).
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save

from grpo_megatron.errors import DataError
from grpo_megatron.files import open_atomically

_DTYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "I32": np.int32,
           "U8": np.uint8, "U16": np.uint16, "U64": np.uint64, "BOOL": np.bool_}


def write_columns(path: Path, columns: dict[str, np.ndarray]) -> str:
    """Write `columns` durably and atomically; returns the file's checksum."""
    payload = save({name: np.ascontiguousarray(array) for name, array in columns.items()})
    with open_atomically(path) as file:
        file.write(payload)
    return xxhash.xxh3_128_hexdigest(payload)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Memory-map every array of a file. Raises DataError when it is truncated or foreign."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
    except (OSError, ValueError) as error:
        raise DataError(f"unreadable sample file: {error}", where=str(path)) from error
    header.pop("__metadata__", None)
    start, columns = 8 + header_size, {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if start + end > size:
            raise DataError(f"sample file is truncated: column {name!r} ends at byte "
                            f"{start + end}, the file at {size}", where=str(path))
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        columns[name] = (np.memmap(path, dtype, "r", start + begin, shape) if end > begin
                         else np.empty(shape, dtype))
    return columns


def file_checksum(path: Path) -> str:
    """Checksum of a whole file, as `write_columns` returns it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
