"""Megatron's `torch_dist` files, read and written one parameter at a time, without a model.

The format is that of torch.distributed.checkpoint: a global tensor is a set of chunks, each a
`torch.save` archive somewhere in a `.distcp` file, and `.metadata` (pickled `Metadata`) says where.
Nothing in it depends on the layout that wrote it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from grpo_megatron.checkpoints.durable import disk_errors, write_json
from grpo_megatron.checkpoints.shard_files import (
    ShardFile,
    as_bytes,
    finish_file,
    will_need,
    write_all,
)
from grpo_megatron.errors import CheckpointError

_OBJECTS = "objects.distcp"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where some rows of a parameter are: a region of the global tensor `key`."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]


class TorchDistReader:
    """Raises CheckpointError when `directory` is none, or damaged."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self.metadata = FileSystemReader(directory).read_metadata()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(f"not a distributed checkpoint: {error}",
                                  where=str(directory)) from error
        self.tensors = {key: found for key, found in self.metadata.state_dict_metadata.items()
                        if isinstance(found, TensorStorageMetadata)}
        self._whole = {(key, chunk.offsets, chunk.sizes): [chunk]
                       for key, found in self.tensors.items() for chunk in found.chunks}

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def read(self, pieces: Sequence[Piece], shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter of `shape` whose rows lie in `pieces`, in order."""
        if len(pieces) == 1:
            return self._region(pieces[0]).reshape(shape)
        out = torch.empty(shape, dtype=self.dtype(pieces[0].key))
        start = 0
        for piece in pieces:
            found = self._region(piece).reshape(-1, *shape[1:])
            out[start : start + len(found)] = found
            start += len(found)
        return out

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Let the disk read the parameter before `read` asks for it."""
        for piece in pieces:
            if place := self.metadata.storage_data.get(MetadataIndex(piece.key, piece.offset)):
                will_need(self.directory / place.relative_path, place.offset, place.length)

    def _region(self, piece: Piece) -> torch.Tensor:
        out, filled = None, 0
        exact = self._whole.get((piece.key, piece.offset, piece.sizes))
        for chunk in exact or self.tensors[piece.key].chunks:
            lows = [max(a, b) for a, b in zip(piece.offset, chunk.offsets, strict=True)]
            highs = [min(a + m, b + n) for a, m, b, n in
                     zip(piece.offset, piece.sizes, chunk.offsets, chunk.sizes, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            part = self._chunk(piece.key, chunk)[_slices(lows, highs, chunk.offsets)]
            if tuple(part.shape) == piece.sizes:
                return part
            if out is None:
                out = torch.empty(piece.sizes, dtype=part.dtype)
            out[_slices(lows, highs, piece.offset)] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise CheckpointError(f"a part of {piece.key} is missing", where=str(self.directory))
        return out

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        place = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        try:
            with open(self.directory / place.relative_path, "rb") as file:
                view = _create_file_view(file, place.offset, place.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {key} from {place.relative_path}: {error}",
                                  where=str(self.directory)) from error


def _slices(lows: Sequence[int], highs: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(lows, highs, origin, strict=True))


class TorchDistFile:
    """One `.distcp` file of archives."""

    def __init__(self, path: Path, file: ShardFile):
        self.path, self.items = path, []
        torch.serialization.set_crc32_options(False)  # the records hold better sums
        with disk_errors(path):
            self._file = _Stream(open(path, "wb", buffering=0))  # noqa: SIM115

    def put(self, pieces: Sequence[Piece], tensor: torch.Tensor) -> None:
        """All rows of a parameter, contiguous, on the CPU."""
        start = 0
        for piece in pieces:
            count = math.prod(piece.sizes) // math.prod(tensor.shape[1:])
            part = tensor[start : start + count].reshape(piece.sizes)
            start += count
            begin = self._file.raw.tell()
            with disk_errors(self.path):
                self._file.save(_own_storage(part))
            length = self._file.raw.tell() - begin
            self.items.append([piece.key, piece.global_shape, piece.offset, piece.sizes,
                               str(part.dtype).removeprefix("torch."), begin, length])

    def close(self) -> None:
        finish_file(self._file.raw, self.path)


class _Stream(io.RawIOBase):
    """What `torch.save` writes to; large blocks begin their way to the disk at once."""

    def __init__(self, raw):
        self.raw, self._error = raw, None

    def save(self, tensor: torch.Tensor) -> None:
        """`torch.save`, which hides an OSError behind a RuntimeError of its own."""
        try:
            torch.save(tensor, self)
        except RuntimeError:
            if self._error is None:
                raise
            raise self._error from None

    def write(self, data) -> int:
        try:
            return write_all(self.raw, memoryview(data))
        except OSError as error:
            self._error = error
            raise


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: `torch.save` writes whole storages."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.from_numpy(as_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def finish(directory: Path, items: dict[str, list[Any]], objects: Iterable[str]) -> None:
    """Write what makes the files one checkpoint.

    Args:
        items: of every `TorchDistFile`, by file name.
        objects: keys of Megatron's extra states, which are empty.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, described in items.items():
        for key, shape, offset, sizes, dtype, begin, length in described:
            properties = TensorProperties(dtype=getattr(torch, dtype))
            held = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(shape), []))
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            held.chunks.append(chunk)
            places[MetadataIndex(key, chunk.offsets)] = _StorageInfo(file, begin, length)
    empty = io.BytesIO()
    torch.save([None], empty)
    known: dict[str, Any] = dict(tensors)
    with disk_errors(directory):
        with open(directory / _OBJECTS, "wb") as file:
            for key in objects:
                places[MetadataIndex(key)] = _StorageInfo(_OBJECTS, file.tell(), file.write(
                    empty.getvalue()))
                known[key] = BytesStorageMetadata()
        torch.save({}, directory / "common.pt")
        with open(directory / ".metadata", "wb") as file:
            pickle.dump(Metadata(known, storage_data=places), file)
    write_json(directory / "metadata.json", {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1,
        "common_backend": "torch", "common_backend_version": 1})


def is_torch_dist(directory: Path) -> bool:
    """Whether `directory` is a checkpoint of ours with distributed weights."""
    return (directory / "weights" / ".metadata").exists()
