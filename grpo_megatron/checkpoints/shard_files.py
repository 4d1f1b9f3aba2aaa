"""A checkpoint that is written file by file, tensor by tensor, and read back.

A file is planned before it is written (names, dtypes, shapes), so any rank can write any file and
a conversion that was killed knows which files it has. A record with digests appears after the file
is on the disk; a file without one is written again."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.checkpoints.durable import PROGRESS, copy_side_files, disk_errors, write_json
from grpo_megatron.checkpoints.recorded_digests import record_digests
from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.gather import all_gathered
from grpo_megatron.weights.tensor_entry import TensorEntry, digest_tensor, grouped

DEFAULT_SHARD_BYTES = 5 << 30
_AHEAD = 8
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file: which units (Megatron parameters) it holds, and as which Hugging Face tensors."""

    name: str
    units: tuple[int, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without what the format adds."""
        return total_bytes(self.entries)


def total_bytes(entries: Iterable[TensorEntry]) -> int:
    """Add up the bytes of several tensors."""
    return sum(entry.num_bytes for entry in entries)


class OutputFile(ABC):
    """One file that is open for tensors; what is written begins its way to the disk at once.

    A subclass knows the format."""

    def __init__(self, path: Path):
        self.path = path
        self.items: list[Any] = []
        """What the format needs to find the tensors again; kept in the record."""
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            self.file = open(path, "wb")  # noqa: SIM115

    @abstractmethod
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, which is contiguous and on the CPU.

        Raises SetupError when the disk is full."""

    def start_writing(self, begin: int) -> int:
        """Let the kernel begin to write what lies after byte `begin` to the disk.

        Does not wait for it. Returns the byte at which the next write goes."""
        self.file.flush()
        end = self.file.tell()
        # on dirty pages this only starts their writing, so that the last sync is short
        os.posix_fadvise(self.file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
        return end

    def close(self) -> None:
        """Sync, then drop from the page cache: reading it back reads the disk.

        Raises SetupError when the disk is full."""
        with disk_errors(self.path), self.file as file:
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Target(ABC):
    """A checkpoint in the making. A subclass knows the format.

    `working` gets another name when all is done. A unit, the tensors of a Megatron parameter, stays
    in one file, as do those of a bundle (numbers of units; default: each alone). A file has at most
    `shard_bytes`, unless one bundle is larger."""

    pattern: str  # of the file names, with {number} from 1 and {count}
    single: str | None = None  # name of an only file

    def __init__(
        self,
        working: Path,
        units: Sequence[Sequence[TensorEntry]],
        shard_bytes: int,
        bundles: Sequence[Sequence[int]] | None = None,
    ):
        self.working = working
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        if bundles is None:
            bundles = [[number] for number in range(len(units))]
        sizes = []
        for bundle in bundles:
            sizes.append(sum(total_bytes(units[number]) for number in bundle))
        groups = grouped(sizes, shard_bytes)
        self.files: list[ShardFile] = []
        for number, group in enumerate(groups, 1):
            name = self.pattern.format(number=number, count=len(groups))
            if self.single and len(groups) == 1:
                name = self.single
            unit_numbers: list[int] = []
            for bundle_number in group:
                unit_numbers += bundles[bundle_number]
            entries: list[TensorEntry] = []
            for unit_number in unit_numbers:
                entries += units[unit_number]
            self.files.append(ShardFile(name, tuple(unit_numbers), tuple(entries)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of all files."""
        return sum(file.num_bytes for file in self.files)

    @abstractmethod
    def open(self, file: ShardFile) -> OutputFile:
        """Make an empty file. Raises SetupError when the disk is full."""

    @abstractmethod
    def read(self, file: ShardFile) -> NamedTensors:
        """Read the tensors of a written file from the disk, under Hugging Face names."""

    def write(
        self,
        file: ShardFile,
        tensors: NamedTensors,
        report: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Write one file of `tensors`; `report` takes the bytes of each.

        The file is synced and recorded while the next one is written: `wait` for the last. Raises
        SetupError when the disk is full."""
        out = self.open(file)
        digests: dict[str, str] = {}
        for name, tensor in tensors:
            tensor = tensor.detach().to("cpu").contiguous()
            digests[name] = digest_tensor(tensor)
            out.put(name, tensor)
            report(tensor.nbytes)
        self.wait()
        self._last = self._pool.submit(self._close, out, file, digests)

    def _close(self, out: OutputFile, file: ShardFile, digests: dict[str, str]) -> None:
        out.close()
        write_json(self._record(file), {"tensors": digests, "items": out.items})

    def wait(self) -> None:
        """Wait until the last file is on the disk; raise what kept it from there."""
        if self._last is not None:
            self._last.result()

    def finish(self, source: Path, dtype: str | None = None) -> None:
        """Write what makes all files one checkpoint: digests, and the side files of `source`.
        dtype: what all weights have been given, None where each kept its own.

        Call on one rank, once all files are there."""
        digests: dict[str, str] = {}
        for file in self.files:
            record = self.record(file)
            assert record is not None  # all files are there
            digests |= record["tensors"]
        record_digests(self.working, digests)
        copy_side_files(source, self.working, dtype)

    def read_back(self, file: ShardFile) -> list[str]:
        """Name the tensors that are not on the disk as they were given.

        If there are any, the file no longer counts as finished and is written again."""
        found = {name: digest_tensor(tensor) for name, tensor in self.read(file)}
        recorded: dict[str, str] = {}
        record = self.record(file)
        if record is not None:
            recorded = record["tensors"]
        bad = []
        for entry in file.entries:
            is_as_given = entry.name in recorded and found.get(entry.name) == recorded[entry.name]
            if not is_as_given:
                bad.append(entry.name)
        if bad:
            self._record(file).unlink(missing_ok=True)
        return sorted(bad)

    def record(self, file: ShardFile) -> dict[str, Any] | None:
        """Read what is recorded of a finished file; None of one that is not finished.

        `tensors` are digests by Hugging Face name, `items` what the format needs."""
        path = self._record(file)
        if not path.exists():
            return None
        recorded: dict[str, Any] = json.loads(path.read_text())
        return recorded

    def _record(self, file: ShardFile) -> Path:
        return self.working / PROGRESS / f"{file.name}.json"


def read_back(
    target: Target, final: Path, report: Callable[[int], object] = lambda num_bytes: None
) -> None:
    """Read every file once more, each rank those of another one; `report` takes their bytes.

    On two machines that shows what never left one.

    Raises MismatchError where any rank read something else. Collective."""
    rank = (dist.get_rank() + 1) % dist.get_world_size()
    bad = []
    for file in target.files[rank :: dist.get_world_size()]:
        bad += target.read_back(file)
        report(file.num_bytes)
    names: list[str] = []
    for bad_there in all_gathered(bad):
        names += bad_there
    refuse_misread(names, final)


def refuse_misread(names: Sequence[str], final: Path) -> None:
    """Raise MismatchError where there are names of tensors that were not read back as they were
    written. final: the directory that they are meant for."""
    if names:
        raise MismatchError(
            f"{len(names)} tensors were read back as something else than was "
            f"written, for example {names[:3]}",
            where=str(final),
            remedy="look at the disk: other bytes came back than went there",
        )


def read_ahead(items: Sequence[Any], prefetch: Callable[[Any], None]) -> Iterator[Any]:
    """Yield the items, while the disk already reads those that `prefetch` was called with."""
    num_asked = 0
    for index, item in enumerate(items):
        if index % _AHEAD == 0:
            for later in items[num_asked : index + 2 * _AHEAD]:
                prefetch(later)
            num_asked = index + 2 * _AHEAD
        yield item


def will_need(path: Path, start: int, count: int) -> None:
    """Let the kernel read `count` bytes of a file into its cache, from byte `start` on."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_WILLNEED)
