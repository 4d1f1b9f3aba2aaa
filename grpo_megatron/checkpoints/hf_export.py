"""Hugging Face checkpoints: the files, and the export of a model that is spread over ranks."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.checkpoints import durable, shard_files
from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.checkpoints.stacked_experts import NO_STACKS, Member, Stacks, stacks_in
from grpo_megatron.errors import CheckpointError
from grpo_megatron.files import empty_directory
from grpo_megatron.weights.gather import ShardedModel, on_rank_0
from grpo_megatron.weights.tensor_entry import TensorEntry, as_bytes, entry_of

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class SafetensorsFile(shard_files.OutputFile):
    """Header first, then each tensor at its place in whatever order they come.

    Matrices of an expert that lie in a stack wait for each other, and are written together."""

    def __init__(self, path: Path, file: shard_files.ShardFile, stacks: Stacks):
        super().__init__(path)
        self._stacks = stacks
        self._missing = {entry.name: entry for entry in file.entries}
        self._begins: dict[str, int] = {}
        self._waiting: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        end = 0
        # wider types first keeps every tensor aligned
        for entry in sorted(stacks.in_files(file.entries), key=_item_bytes, reverse=True):
            begin = end
            end += entry.num_bytes
            self._begins[entry.name] = begin
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        with durable.disk_errors(path):
            self.file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor at its place. Raises CheckpointError for one that was not planned."""
        planned = self._missing.pop(name, None)
        if planned is None or entry_of(name, tensor) != planned:
            raise CheckpointError(
                f"{name!r} {tensor.dtype} {tuple(tensor.shape)} was not planned for this file",
                where=str(self.path),
            )
        member = self._stacks.member(name)
        if member is None:
            self._write(self._begins[name], tensor)
            return
        block = self._block(member, tensor)
        if block is not None:
            self._write(self._begins[member.stack] + member.expert * block.nbytes, block)

    def _block(self, member: Member, matrix: torch.Tensor) -> torch.Tensor | None:
        """Return what the stack has of the matrix's expert, once all of it has come."""
        waiting = self._waiting.setdefault((member.stack, member.expert), {})
        waiting[member.place] = matrix
        if len(waiting) < member.count:
            return None
        del self._waiting[member.stack, member.expert]
        return member.block([waiting[place] for place in range(member.count)])

    def _write(self, begin: int, tensor: torch.Tensor) -> None:
        """Write a tensor at byte `begin` of those of all tensors."""
        with durable.disk_errors(self.path):
            self.file.seek(self._start + begin)
            self.file.write(as_bytes(tensor.contiguous()))
            self.start_writing(self._start + begin)

    def close(self) -> None:
        """Sync and close. Raises CheckpointError where planned tensors did not come."""
        if self._missing:
            raise CheckpointError(
                f"{len(self._missing)} tensors did not come, for example "
                f"{sorted(self._missing)[:3]}",
                where=str(self.path),
            )
        super().close()


class HFTarget(shard_files.Target):
    """Safetensors files with an index, and the side files of the source."""

    pattern = "model-{number:05d}-of-{count:05d}.safetensors"
    single = "model.safetensors"

    def __init__(
        self,
        working: Path,
        units: Sequence[Sequence[TensorEntry]],
        shard_bytes: int,
        stacks: Stacks = NO_STACKS,
    ):
        """stacks: of the family, in which experts are written."""
        self._stacks = stacks
        super().__init__(working, units, shard_bytes, stacks.bundles(units))

    def open(self, file: shard_files.ShardFile) -> SafetensorsFile:
        """Begin a file with its header. Raises SetupError when the disk is full."""
        return SafetensorsFile(self.working / file.name, file, self._stacks)

    @cached_property
    def _reader(self) -> HFReader:
        return HFReader(self.working, self._stacks)

    def read(self, file: shard_files.ShardFile) -> shard_files.NamedTensors:
        """Yield names and tensors (views of the mapped file) of a written file."""
        for entry in file.entries:
            yield entry.name, self._reader.tensor(entry.name)

    def finish(self, source: Path, dtype: str | None = None) -> None:
        """Write the index, where there are several files, and what `Target.finish` writes."""
        if len(self.files) > 1:
            weight_map = {}
            for file in self.files:
                for entry in self._stacks.in_files(file.entries):
                    weight_map[entry.name] = file.name
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            durable.write_json(self.working / "model.safetensors.index.json", index)
        super().finish(source, dtype)


def _item_bytes(entry: TensorEntry) -> int:
    return entry.torch_dtype.itemsize


def export_model(
    model: ShardedModel,
    directory: Path,
    source: Path,
    shard_bytes: int = shard_files.DEFAULT_SHARD_BYTES,
    mark: Callable[[Path], None] | None = None,
) -> int:
    """Write a model that is spread over all ranks; each writes its own files. Collective.

    Config, tokenizer and template are those of `source`; `mark` changes them, in the directory that
    it is given, before the export has its name. Returns the bytes of weights written.
    Raises SetupError when the disk is full, MismatchError where other bytes are read back."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    working = durable.working_directory(directory)
    on_rank_0(empty_directory, working)
    units = [entry.parameter.entries(entry.dtype) for entry in model.entries]
    target = HFTarget(working, units, shard_bytes, stacks_in(source))
    entries = []
    receivers = []
    for number, unit in _interleaved(target.files, world):
        entries.append(model.entries[unit])
        receivers.append(number % world)
    tensors = model.stream(entries, receivers)
    for file in target.files[rank::world]:
        tensors_of_file = islice(tensors, len(file.entries))  # which come first: `_interleaved`
        target.write(file, tensors_of_file)
    for _ in tensors:  # ranks that have all of theirs still take part in the gathers
        pass
    target.wait()
    dist.barrier()
    on_rank_0(target.finish, source)
    shard_files.read_back(target, directory)
    if mark is not None:
        on_rank_0(mark, working)
    on_rank_0(durable.commit, working, directory)
    return target.num_bytes


def _interleaved(files: Sequence[shard_files.ShardFile], world: int) -> Iterator[tuple[int, int]]:
    """Yield file number and unit so that `world` files grow together: no rank waits for another's
    file.

    Rank r of `world` writes the files r, r + world, r + 2 world, ... What is yielded for these is
    all of the first of them, in the order of its units, then all of the second, and so on."""
    for first in range(0, len(files), world):
        growing = [file.units for file in files[first : first + world]]
        for units in zip_longest(*growing):
            for number, unit in enumerate(units, first):
                if unit is not None:  # this file has fewer units
                    yield number, unit
