"""Read back an offline Weights & Biases run, to prove that the mirror tells the same as the file.

wandb 0.31 has no Python reader of its own any more. The format is LevelDB's log: 32 KiB blocks
of records (CRC-32, length, type), where a record may be split over blocks; each whole record is
a protobuf message.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.errors import DataError

_FILE_HEADER = struct.Struct("<4sHB")
_RECORD_HEADER = struct.Struct("<IHB")
_IDENTITY = (b":W&B", 0xBEE1)
_BLOCK_BYTES = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_offline_wandb(path: Path) -> list[dict[str, Any]]:
    """The logged records of a `.wandb` file, in order, without wandb's own `_` keys.

    A directory (a run's `wandb/`) stands for all `.wandb` files below it, by name, which is by
    start time: the pieces of a resumed run.

    Raises:
        DataError: No such file, another format, or a checksum that does not fit.
    """
    files = sorted(path.rglob("*.wandb")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataError(
            "no offline wandb run there",
            where=str(path),
            remedy="give a .wandb file or the wandb/ of a run directory",
        )
    return [record for file in files for record in _history(file)]


def _history(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    for message in _messages(path):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(message)
        if record.WhichOneof("record_type") != "history":
            continue
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        yield {name: value for name, value in items.items() if not name.startswith("_")}


def _messages(path: Path) -> Iterator[bytes]:
    """Whole records; an unfinished one at the end (a killed run) is left out."""
    content = path.read_bytes()
    if len(content) < _FILE_HEADER.size or _FILE_HEADER.unpack_from(content)[:2] != _IDENTITY:
        raise DataError("not an offline wandb file", where=str(path))
    position, parts = _FILE_HEADER.size, []
    while True:
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEADER.size:  # a header is never split
            position += left
        if position + _RECORD_HEADER.size > len(content):
            return
        checksum, length, kind = _RECORD_HEADER.unpack_from(content, position)
        start = position + _RECORD_HEADER.size
        position = start + length
        if kind == 0 or position > len(content):
            return
        part = content[start:position]
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise DataError("checksum does not fit", where=f"{path}, byte {start}")
        parts = [part] if kind in (_FULL, _FIRST) else [*parts, part]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
