"""Which files a checkpoint's weights are in, and whether they are there as they were written."""

import json
from pathlib import Path

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""At the start of a file: the length of its header, little-endian."""


def named_files(directory: Path) -> list[str]:
    """Return the files that hold the weights of a Hugging Face checkpoint: those that the index
    names, or the single one; none where the index cannot be read."""
    index = directory / _INDEX
    if not index.exists():
        return [_SINGLE_FILE]
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def has_whole_weights(directory: Path) -> bool:
    """Whether all files of a checkpoint's weights are there and as long as their headers say. Their
    numbers are not read."""
    files = named_files(directory)
    return bool(files) and all(is_whole(directory / name) for name in files)


def is_whole(file: Path) -> bool:
    """Whether a file of safetensors is as long as its header says."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            size = file.stat().st_size
            if length > size:
                return False
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    return bool(size == _LENGTH_BYTES + length + end)
