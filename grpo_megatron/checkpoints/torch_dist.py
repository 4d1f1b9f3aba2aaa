"""Megatron's `torch_dist` files, read and written one parameter at a time, without a model.

The format is that of torch.distributed.checkpoint: a global tensor is a set of chunks, each a
`torch.save` archive somewhere in a `.distcp` file, and `.metadata` (pickled `Metadata`) says where.
Nothing in it depends on the layout that wrote it."""

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from grpo_megatron.checkpoints import durable, hf_import, shard_files
from grpo_megatron.errors import CheckpointError
from grpo_megatron.weights.parameters import CARRIED, VOCABULARY, Parameter, carried_parameter
from grpo_megatron.weights.transfer_plan import as_bytes

_OBJECTS = "objects.distcp"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where some rows of a parameter are: a region of the global tensor `key`."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """What a checkpoint of a model consists of, in checkpoint order."""

    parameters: tuple[Parameter, ...]
    pieces: Mapping[str, tuple[Piece, ...]]  # by parameter, in the order of its rows
    objects: tuple[str, ...]  # keys of extra states, which hold nothing

    def pieces_of(self, parameter: Parameter) -> tuple[Piece, ...]:
        shape = parameter.shape
        return self.pieces.get(parameter.name) or (
            Piece(parameter.name, (0,) * len(shape), shape, shape),
        )  # a carried one


def is_torch_dist(directory: Path) -> bool:
    """Whether `directory` is a checkpoint of ours with distributed weights."""
    return (directory / "weights" / ".metadata").exists()


class MegatronSource:
    """A distributed checkpoint, of a run or converted, as the parameters of its model.

    Raises CheckpointError when it is none, damaged, or of another model."""

    def __init__(self, table: ParameterTable, directory: Path, *, carry: bool = True):
        self.table = table
        self.directory = directory / "weights"
        with durable.explained("not a distributed checkpoint", self.directory):
            self.metadata = FileSystemReader(self.directory).read_metadata()
        self.stored = {
            key: found
            for key, found in self.metadata.state_dict_metadata.items()
            if isinstance(found, dcp.TensorStorageMetadata)
        }
        self._whole = {
            (key, chunk.offsets, chunk.sizes): [chunk]
            for key, found in self.stored.items()
            for chunk in found.chunks
        }
        found = {
            key: tuple(tensor.size)
            for key, tensor in self.stored.items()
            if not key.startswith("optimizer.")
        }
        carried = {key: found.pop(key) for key in sorted(found) if key.startswith(CARRIED)}
        wanted = {
            piece.key: piece.global_shape
            for p in table.parameters
            for piece in table.pieces[p.name]
        }
        for key in VOCABULARY:  # the layout that saved it may have padded them
            if key in wanted and key in found and found[key][0] > wanted[key][0]:
                found[key] = (wanted[key][0], *found[key][1:])
        hf_import.refuse_unfit(directory, found, wanted)
        self.parameters = [
            *table.parameters,
            *(
                carried_parameter(key.removeprefix(CARRIED), shape)
                for key, shape in carried.items()
                if carry
            ),
        ]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        return self.stored[self.table.pieces_of(parameter)[0].key].properties.dtype

    def tensors(self, parameter: Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        regions = [
            self._region(piece).reshape(-1, *parameter.shape[1:])
            for piece in self.table.pieces_of(parameter)
        ]
        full = torch.cat(regions) if len(regions) > 1 else regions[0]
        return zip((name for name, _ in parameter.hf), parameter.split(full), strict=True)

    def prefetch(self, parameter: Parameter) -> None:
        for piece in self.table.pieces_of(parameter):
            if at := self.metadata.storage_data.get(dcp.MetadataIndex(piece.key, piece.offset)):
                shard_files.will_need(self.directory / at.relative_path, at.offset, at.length)

    def _region(self, piece: Piece) -> torch.Tensor:
        out: torch.Tensor | None = None
        filled = 0
        exact = self._whole.get((piece.key, torch.Size(piece.offset), torch.Size(piece.sizes)))
        for chunk in exact or self.stored[piece.key].chunks:
            bounds = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(
                    piece.offset, piece.sizes, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if any(low >= high for low, high in bounds):
                continue
            part = self._chunk(piece.key, chunk)[_slices(bounds, chunk.offsets)]
            if tuple(part.shape) == piece.sizes:
                return part
            if out is None:
                out = torch.empty(piece.sizes, dtype=part.dtype)
            out[_slices(bounds, piece.offset)] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise CheckpointError(f"a part of {piece.key} is missing", where=str(self.directory))
        return out

    def _chunk(self, key: str, chunk: dcp.ChunkStorageMetadata) -> torch.Tensor:
        place = self.metadata.storage_data[dcp.MetadataIndex(key, chunk.offsets)]
        with (
            durable.explained(f"cannot read {key} from {place.relative_path}", self.directory),
            open(self.directory / place.relative_path, "rb") as file,
        ):
            view: Any = _create_file_view(file, place.offset, place.length)
            tensor: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return tensor


def _slices(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - o, high - o) for (low, high), o in zip(bounds, origin, strict=True))


class DistcpFile(shard_files.OutputFile):
    """Archives one after the other; a parameter is written once all of its tensors came."""

    def __init__(self, path: Path, parameters: Sequence[Parameter], table: ParameterTable):
        super().__init__(path)
        torch.serialization.set_crc32_options(False)  # the records hold better sums
        self._table = table
        self._parameters = list(parameters)
        self._held: list[torch.Tensor] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._held.append(tensor)
        if len(self._held) == len(self._parameters[0].hf):
            parameter = self._parameters.pop(0)
            rows = parameter.merge(self._held).contiguous().flatten()
            self._held = []
            pieces = self._table.pieces_of(parameter)
            parts = rows.split([math.prod(piece.sizes) for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                self._save(piece, part.view(piece.sizes))

    def _save(self, piece: Piece, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # `torch.save` writes all of it
            tensor = torch.frombuffer(as_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)
        begin = self.file.tell()
        with durable.disk_errors(self.path):
            torch.save(tensor, self.file)
            end = self.start_writing(begin)
        self.items.append(
            [
                piece.key,
                piece.global_shape,
                piece.offset,
                piece.sizes,
                str(tensor.dtype).removeprefix("torch."),
                begin,
                end - begin,
            ]
        )


class MegatronTarget(shard_files.Target):
    """A distributed checkpoint, which loads at any layout; `parameters` are those of the source."""

    pattern = "part-{number:05d}-of-{count:05d}.distcp"

    def __init__(self, table: ParameterTable, parameters: Sequence[Parameter], *arguments: Any):
        super().__init__(*arguments)
        self.table = table
        self.parameters = parameters

    def open(self, file: shard_files.ShardFile) -> DistcpFile:
        return DistcpFile(
            self.working / "weights" / file.name,
            [self.parameters[unit] for unit in file.units],
            self.table,
        )

    @cached_property
    def _source(self) -> MegatronSource:
        return MegatronSource(self.table, self.working)

    def read(self, file: shard_files.ShardFile) -> shard_files.NamedTensors:
        return chain.from_iterable(
            self._source.tensors(self.parameters[unit]) for unit in file.units
        )

    def finish(self, source: Path) -> None:
        items = {}
        for file in self.files:
            record = self.record(file)
            assert record is not None  # all files are there
            items[file.name] = record["items"]
        _write_metadata(self.working / "weights", self.table.objects, items)
        super().finish(source)
        durable.write_json(self.working / "complete.json", {"converted_from": str(source)})


def _write_metadata(
    directory: Path, objects: Sequence[str], items: Mapping[str, list[Any]]
) -> None:
    """What makes the files one checkpoint. items: of every `DistcpFile`, by file name."""
    known: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, described in items.items():
        for key, shape, offset, sizes, dtype, begin, length in described:
            kind = dcp.TensorProperties(dtype=getattr(torch, dtype))
            held = known.setdefault(key, dcp.TensorStorageMetadata(kind, torch.Size(shape), []))
            chunk = dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            held.chunks.append(chunk)
            places[dcp.MetadataIndex(key, chunk.offsets)] = _StorageInfo(name, begin, length)
    empty = io.BytesIO()
    torch.save([None], empty)
    with durable.disk_errors(directory):
        with open(directory / _OBJECTS, "wb") as file:
            for key in objects:
                places[dcp.MetadataIndex(key)] = _StorageInfo(
                    _OBJECTS, file.tell(), file.write(empty.getvalue())
                )
                known[key] = dcp.BytesStorageMetadata()
        torch.save({}, directory / "common.pt")
        with open(directory / ".metadata", "wb") as file:
            pickle.dump(dcp.Metadata(known, storage_data=places), file)
    durable.write_json(
        directory / "metadata.json",
        {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        },
    )
