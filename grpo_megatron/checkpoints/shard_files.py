"""Files of a checkpoint that is written tensor by tensor, each with a record of its digests.

A file is planned before it is written (names, dtypes, shapes), so any rank can write any file and
a conversion that was killed knows which files it has. The record appears after the file is on the
disk; a file without one is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from grpo_megatron.checkpoints.durable import PROGRESS, disk_errors, write_json
from grpo_megatron.errors import CheckpointError
from grpo_megatron.weights.digests import file_digest
from grpo_megatron.weights.transfer_plan import TensorEntry, entry_of

_AHEAD = 8
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file: which units (Megatron parameters) it holds, and as which Hugging Face tensors."""

    name: str
    units: tuple[int, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def plan_files(units: Sequence[Sequence[TensorEntry]], limit: int, pattern: str,
               single: str | None = None) -> list[ShardFile]:
    """In order; a file is closed before the unit that would take it over `limit` bytes.

    Args:
        pattern: of the names, with `{number}` from 1 and `{count}`; `single`: of an only file.
    """
    groups: list[list[int]] = []
    size = 0
    for index, entries in enumerate(units):
        num_bytes = sum(entry.num_bytes for entry in entries)
        if not groups or size + num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += num_bytes
    return [ShardFile(single if single and len(groups) == 1 else
                      pattern.format(number=number, count=len(groups)), tuple(group),
                      tuple(entry for index in group for entry in units[index]))
            for number, group in enumerate(groups, 1)]


class OutputFile(Protocol):
    """What a format does with one file."""

    items: list[Any]
    """What the format needs to find the tensors again; kept in the record."""

    def close(self) -> None:
        """Return once the bytes are on the disk."""


class SafetensorsFile:
    """Header first, then each tensor at its place in whatever order they come."""

    def __init__(self, path: Path, file: ShardFile):
        self.path, self.items = path, []
        self._missing = {entry.name: entry for entry in file.entries}
        self._offsets, header, end = {}, {"__metadata__": {"format": "pt"}}, 0
        # wider types first keeps every tensor aligned
        for entry in sorted(file.entries, key=lambda e: -e.torch_dtype.itemsize):
            self._offsets[entry.name] = end
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape,
                                  "data_offsets": (end, end := end + entry.num_bytes)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        with disk_errors(path):
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Contiguous, on the CPU."""
        entry = self._missing.pop(name, None)
        if entry is None or entry_of(name, tensor) != entry:
            raise CheckpointError(f"{name!r} {tensor.dtype} {tuple(tensor.shape)} was not planned "
                                  "for this file", where=str(self.path))
        data, place = memoryview(as_bytes(tensor)), self._start + self._offsets[name]
        with disk_errors(self.path):
            self._file.seek(place)
            write_all(self._file, data)

    def close(self) -> None:
        if self._missing:
            raise CheckpointError(f"{len(self._missing)} tensors did not come, for example "
                                  f"{sorted(self._missing)[:3]}", where=str(self.path))
        finish_file(self._file, self.path)


def as_bytes(tensor: torch.Tensor):
    """uint8 [nbytes] numpy view of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def write_all(file, data: memoryview) -> int:
    """Write in pieces whose write-back starts at once, so that the last sync is short."""
    start = file.tell()
    while data:
        count = file.write(data[: 32 << 20])
        # On dirty pages this only starts their writing.
        os.posix_fadvise(file.fileno(), file.tell() - count, count, os.POSIX_FADV_DONTNEED)
        data = data[count:]
    return file.tell() - start


def finish_file(file, path: Path) -> None:
    """Sync, then drop from the page cache: reading it back reads the disk."""
    with disk_errors(path), file:
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Records:
    """The finished files of a working directory."""

    def __init__(self, working: Path):
        self.folder = working / PROGRESS
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future | None = None

    def finish(self, out: OutputFile, file: ShardFile, digests: dict[str, str]) -> None:
        """Close `out` and record it, while the caller goes on with the next file."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1)
        self._last = self._pool.submit(self._finish, out, file, digests)

    def wait(self) -> None:
        """Until the last file is on the disk; raises what kept it from there."""
        if self._last is not None:
            self._last.result()

    def _finish(self, out: OutputFile, file: ShardFile, digests: dict[str, str]) -> None:
        out.close()
        write_json(self.folder / f"{file.name}.json", {"tensors": digests, "items": out.items})

    def read(self, file: ShardFile) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / f"{file.name}.json").read_text())
        except OSError:
            return None

    def digests(self, files: Iterable[ShardFile]) -> dict[str, str]:
        """Of all tensors, by Hugging Face name."""
        return {name: digest for file in files
                for name, digest in (self.read(file) or {"tensors": {}})["tensors"].items()}


def read_ahead(items: Sequence[Any], prefetch: Callable[[Any], None]) -> Iterator[Any]:
    """The items, while the disk already reads the next ones."""
    for index, item in enumerate(items):
        if index % _AHEAD == 0:
            for later in items[index + _AHEAD if index else 0 : index + 2 * _AHEAD]:
                prefetch(later)
        yield item


def will_need(path: Path, start: int, count: int) -> None:
    """Let the kernel read a part of a file into its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def digests_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: file_digest(tensor) for name, tensor in tensors}


def compare_digests(found: dict[str, str], recorded: dict[str, str]) -> list[str]:
    """Names that were read back as something else, or not at all."""
    return sorted(name for name in recorded if found.get(name) != recorded[name])
