"""Megatron's `torch_dist` files, read and written one parameter at a time, without a model.

The format is that of torch.distributed.checkpoint: a global tensor is a set of chunks, each a
`torch.save` archive somewhere in a `.distcp` file, and `.metadata` (pickled `Metadata`) says where.
Nothing in it depends on the layout that wrote it."""

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from grpo_megatron.checkpoints import durable, hf_import, shard_files
from grpo_megatron.checkpoints.fitting import adapter_domains
from grpo_megatron.checkpoints.plain_pickles import plain_data_only, refusals_named
from grpo_megatron.checkpoints.retention import ADAPTERS_FOLDER, WEIGHTS_FOLDER
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import CheckpointError
from grpo_megatron.weights.low_rank import (
    addend_of_dora,
    exact_sum,
    low_rank_product,
    merged,
    row_norms,
)
from grpo_megatron.weights.parameters import (
    ADAPTERS,
    CARRIED,
    REWARD_HEAD,
    VALUE_HEAD,
    VOCABULARY,
    Parameter,
    carried_parameter,
    without_expert,
)
from grpo_megatron.weights.tensor_entry import as_bytes

_OBJECTS = "objects.distcp"
_ChunkKey = tuple[str, torch.Size, torch.Size]
"""Key, offsets and sizes of a chunk."""


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """Where some rows of a parameter are: a region of the global tensor `key`."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """What a checkpoint of a model consists of, in checkpoint order."""

    parameters: tuple[Parameter, ...]
    regions: Mapping[str, tuple[StoredRegion, ...]]  # by parameter, in the order of its rows
    objects: tuple[str, ...]  # keys of extra states, which hold nothing

    def regions_of(self, parameter: Parameter) -> tuple[StoredRegion, ...]:
        """Return where the rows of a parameter are, in order; a carried one is a tensor itself."""
        if parameter.name in self.regions:
            return self.regions[parameter.name]
        shape = parameter.shape
        return (StoredRegion(parameter.name, (0,) * len(shape), shape, shape),)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a chunk are: `length` of them from `offset` on."""

    file: Path
    offset: int
    length: int


class MegatronSource:
    """A distributed checkpoint, of a run or converted, as the parameters of its model.

    With `carry`, also the tensors that Megatron's model has no parameter for. domain: whose
    adapters are merged into the weights, where domains have adapters of their own. exact_sums:
    weights with adapters come in fp32, to be rounded once to another dtype than they are stored in.
    Raises CheckpointError when it is none, damaged, of another model, or has no such domain."""

    def __init__(
        self,
        table: ParameterTable,
        directory: Path,
        *,
        carry: bool = True,
        domain: str = "",
        exact_sums: bool = False,
    ):
        self.table = table
        self._add = merged
        if exact_sums:
            self._add = exact_sum
        self.directory = directory / WEIGHTS_FOLDER
        self.stored: dict[str, dcp.TensorStorageMetadata] = {}
        self._chunks: dict[_ChunkKey, dcp.ChunkStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, _Place] = {}
        self._read_metadata(self.directory)
        if domain:
            _require_domain(directory, domain)
            self._read_metadata(directory / ADAPTERS_FOLDER / domain)
        self.parameters = list(table.parameters)
        self._adapters: set[str] = set()
        found: dict[str, hf_import.Shape] = {}
        for key in sorted(self.stored):
            shape = tuple(self.stored[key].size)
            if key.startswith(("optimizer.", VALUE_HEAD)):
                continue
            if key.startswith(ADAPTERS):
                self._adapters.add(key)
                continue
            if not key.startswith(CARRIED):
                found[key] = shape
            elif carry:
                self.parameters.append(carried_parameter(key.removeprefix(CARRIED), shape))
        self._refuse_unfit(directory, found)
        self._scale = 0.0
        if self._adapters:
            self._scale = _scale_of_adapters(directory)

    def _read_metadata(self, folder: Path) -> None:
        """Note what a folder of the checkpoint has, and where."""
        with (
            durable.explained("not a distributed checkpoint", folder),
            plain_data_only(folder),
        ):
            metadata = FileSystemReader(folder).read_metadata()
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, dcp.TensorStorageMetadata):
                self.stored[key] = stored
                for chunk in stored.chunks:
                    self._chunks[key, chunk.offsets, chunk.sizes] = chunk
        for index, place in metadata.storage_data.items():
            path = folder / place.relative_path
            self._places[index] = _Place(path, place.offset, place.length)

    def _refuse_unfit(self, directory: Path, found: dict[str, hf_import.Shape]) -> None:
        wanted: dict[str, hf_import.Shape] = {}
        for parameter in self.table.parameters:
            for region in self.table.regions[parameter.name]:
                wanted[region.key] = region.global_shape
        if REWARD_HEAD in found and REWARD_HEAD not in wanted:
            raise CheckpointError(
                "it is of a reward model, and its config.json does not say what its scalars are, "
                "as in checkpoints of earlier releases",
                where=str(directory),
                remedy="give the export of its run, or a checkpoint that the run has written since",
            )
        for key in VOCABULARY:  # the layout that saved it may have padded them
            if key in wanted and key in found and found[key][0] > wanted[key][0]:
                found[key] = (wanted[key][0], *found[key][1:])
        hf_import.refuse_unfit(directory, found, wanted)

    def adapted_parameters(self) -> list[Parameter]:
        """Return the parameters with an adapter that is merged into them."""
        found = []
        for parameter in self.parameters:
            if any(self._adapter_of(name) for name, _ in parameter.hf):
                found.append(parameter)
        return found

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""
        first = self.table.regions_of(parameter)[0]
        return self.stored[first.key].properties.dtype

    def tensors(self, parameter: Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the Hugging Face names and tensors of a parameter, without padding.

        Raises CheckpointError where a part of it is missing or unreadable."""
        if parameter.name.startswith(CARRIED):  # has one tensor, which may have no rows
            [(name, _)] = parameter.hf
            yield name, self._whole(parameter.name)
            return
        rows = []
        for region in self.table.regions_of(parameter):
            rows.append(self._read(region).reshape(-1, *parameter.shape[1:]))
        full = rows[0]
        if len(rows) > 1:
            full = torch.cat(rows)
        for (name, _), tensor in zip(parameter.hf, parameter.split(full), strict=True):
            yield name, self._with_adapter(name, tensor)

    def _with_adapter(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Merge the adapter of a linear layer into its weight, where it has one."""
        prefix = self._adapter_of(name)
        if not prefix:
            return weight
        a = self._whole(f"{prefix}lora_A.weight")
        b = self._whole(f"{prefix}lora_B.weight")
        product = low_rank_product(a, b, self._scale)
        if f"{prefix}lora_magnitude_vector" not in self._adapters:
            return self._add(weight, product)
        magnitude = self._whole(f"{prefix}lora_magnitude_vector")
        norms = row_norms(weight, product)
        return self._add(weight, addend_of_dora(weight, product, magnitude, norms))

    def _adapter_of(self, name: str) -> str:
        """Return what the keys of the adapter beside a linear layer begin with; empty without
        one."""
        module = name.removesuffix(".weight")
        for known in (module, without_expert(module)):
            prefix = f"{ADAPTERS}{known}."
            if f"{prefix}lora_A.weight" in self._adapters:
                return prefix
        return ""

    def _whole(self, key: str) -> torch.Tensor:
        """Read a global tensor."""
        return self._read(_whole_region(key, self.stored[key]))

    def prefetch(self, parameter: Parameter) -> None:
        """Let the disk read a parameter before `tensors` asks for it."""
        for region in self.table.regions_of(parameter):
            place = self._places.get(dcp.MetadataIndex(region.key, region.offset))
            if place is not None:
                shard_files.will_need(place.file, place.offset, place.length)

    def _read(self, region: StoredRegion) -> torch.Tensor:
        """Read a region of a global tensor, put together of the chunks that it overlaps."""
        chunks = self.stored[region.key].chunks
        exact = self._chunks.get((region.key, torch.Size(region.offset), torch.Size(region.sizes)))
        if exact is not None:
            chunks = [exact]
        out: torch.Tensor | None = None
        filled = 0
        for chunk in chunks:
            bounds = _overlap(region, chunk)
            if bounds is None:
                continue
            part = self._chunk(region.key, chunk)[_slices(bounds, chunk.offsets)]
            if tuple(part.shape) == region.sizes:
                return part
            if out is None:
                out = torch.empty(region.sizes, dtype=part.dtype)
            out[_slices(bounds, region.offset)] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise CheckpointError(f"a part of {region.key} is missing", where=str(self.directory))
        return out

    def _chunk(self, key: str, chunk: dcp.ChunkStorageMetadata) -> torch.Tensor:
        place = self._places[dcp.MetadataIndex(key, chunk.offsets)]
        folder = place.file.parent
        with (
            durable.explained(f"cannot read {key} from {place.file.name}", folder),
            refusals_named(place.file),
            open(place.file, "rb") as file,
        ):
            view: Any = _create_file_view(file, place.offset, place.length)
            tensor: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return tensor


def _require_domain(directory: Path, domain: str) -> None:
    """Raise CheckpointError where a checkpoint has no adapters of a domain."""
    domains = adapter_domains(directory)
    if domain in domains:
        return
    if not domains:
        raise CheckpointError(
            "domains have no adapters of their own in this checkpoint",
            where=str(directory),
            remedy="leave --domain away",
        )
    raise CheckpointError(
        f"it has no adapters of a domain {domain!r}",
        where=str(directory),
        remedy=did_you_mean(domain, domains),
    )


def _whole_region(key: str, stored: dcp.TensorStorageMetadata) -> StoredRegion:
    """Return the region that is all of a tensor."""
    shape = tuple(stored.size)
    return StoredRegion(key, (0,) * len(shape), shape, shape)


def _scale_of_adapters(directory: Path) -> float:
    """Return by what the adapters of a checkpoint are multiplied.

    Raises CheckpointError where it does not say."""
    with durable.explained("does not say what its adapters are", directory):
        state = json.loads((directory / "complete.json").read_text())
        return LoraConfig(**state["lora"]).scale


def _overlap(region: StoredRegion, chunk: dcp.ChunkStorageMetadata) -> list[tuple[int, int]] | None:
    """Return begin and end by dimension of what both have of the global tensor; None: nothing."""
    bounds = []
    for region_begin, region_size, chunk_begin, chunk_size in zip(
        region.offset, region.sizes, chunk.offsets, chunk.sizes, strict=True
    ):
        begin = max(region_begin, chunk_begin)
        end = min(region_begin + region_size, chunk_begin + chunk_size)
        if begin >= end:
            return None
        bounds.append((begin, end))
    return bounds


def _slices(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of `bounds` in a tensor whose first element is at `origin`."""
    slices = []
    for (begin, end), start in zip(bounds, origin, strict=True):
        slices.append(slice(begin - start, end - start))
    return tuple(slices)


class DistcpFile(shard_files.OutputFile):
    """Archives one after the other; a parameter is written once all of its tensors came."""

    def __init__(self, path: Path, parameters: Sequence[Parameter], table: ParameterTable):
        super().__init__(path)
        torch.serialization.set_crc32_options(False)  # the records hold better sums
        self._table = table
        self._parameters = list(parameters)
        self._held: list[torch.Tensor] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor, in the order of the parameters' Hugging Face tensors."""
        self._held.append(tensor)
        if len(self._held) == len(self._parameters[0].hf):
            parameter = self._parameters.pop(0)
            rows = parameter.merge(self._held).contiguous().flatten()
            self._held = []
            regions = self._table.regions_of(parameter)
            sizes = [math.prod(region.sizes) for region in regions]
            for region, part in zip(regions, rows.split(sizes), strict=True):
                self._save(region, part.view(region.sizes))

    def _save(self, region: StoredRegion, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # `torch.save` writes all of it
            tensor = torch.frombuffer(as_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)
        begin = self.file.tell()
        with durable.disk_errors(self.path):
            torch.save(tensor, self.file)
            end = self.start_writing(begin)
        self.items.append(
            [
                region.key,
                region.global_shape,
                region.offset,
                region.sizes,
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
        """Make an empty file for the parameters of its units."""
        return DistcpFile(self.working / "weights" / file.name, self._held_by(file), self.table)

    def _held_by(self, file: shard_files.ShardFile) -> list[Parameter]:
        return [self.parameters[unit] for unit in file.units]

    @cached_property
    def _source(self) -> MegatronSource:
        return MegatronSource(self.table, self.working)

    def read(self, file: shard_files.ShardFile) -> shard_files.NamedTensors:
        """Yield Hugging Face names and tensors of a written file; after `finish`."""
        for parameter in self._held_by(file):
            yield from self._source.tensors(parameter)

    def finish(self, source: Path, dtype: str | None = None) -> None:
        """Write the metadata, what `Target.finish` writes, and the mark that all is there."""
        items = {}
        for file in self.files:
            record = self.record(file)
            assert record is not None  # all files are there
            items[file.name] = record["items"]
        _write_metadata(self.working / "weights", self.table.objects, items)
        super().finish(source, dtype)
        durable.write_json(self.working / "complete.json", {"converted_from": str(source)})


def _write_metadata(
    directory: Path, objects: Sequence[str], items: Mapping[str, list[Any]]
) -> None:
    """Write what makes the files one checkpoint. items: of every `DistcpFile`, by file name."""
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
