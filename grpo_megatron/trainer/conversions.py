"""The two directions of a conversion, and the check of either kind of checkpoint.

Each knows the files that it writes, how to write one, and how to read one back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from grpo_megatron.checkpoints import torch_dist
from grpo_megatron.checkpoints.durable import copy_side_files, write_json
from grpo_megatron.checkpoints.hf_export import HFFiles, finish_hf, plan_hf_files, read_back
from grpo_megatron.checkpoints.hf_reader import HFReader
from grpo_megatron.checkpoints.shard_files import (
    Records,
    ShardFile,
    compare_digests,
    digests_of,
    plan_files,
    read_ahead,
)
from grpo_megatron.checkpoints.torch_dist import TorchDistFile, TorchDistReader
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer.parameters import CARRIED, Parameter, ParameterTable
from grpo_megatron.weights.digests import file_digest
from grpo_megatron.weights.layout import merge, split
from grpo_megatron.weights.rules import carried_names

_LISTED = 20
Report = Callable[[int], None]
"""Told how many bytes were handled since the last call."""


class Conversion(Protocol):
    """What `trainer.convert` drives."""

    files: list[ShardFile]

    def write(self, file: ShardFile, report: Report) -> None:
        """Write one file; it is recorded while the next one is written."""

    def close(self) -> None:
        """Until the last one is recorded."""

    def finish(self) -> None:
        """Once all files are there: what makes them one checkpoint. On one rank."""

    def read_back(self, file: ShardFile) -> list[str]:
        """Names of tensors that are not on the disk as they were given."""


class HFSource:
    """A Hugging Face checkpoint as parameters of the model that its config.json describes.

    Args:
        carry: also what the checkpoint has and Megatron's model has not (`carried_names`).
    """

    def __init__(self, table: ParameterTable, directory: Path, *, carry: bool = True):
        self.base, self.reader = table, HFReader(directory)
        self.reader.check_index()
        names = self.reader.names()
        carried = carried_names(read_config(directory), names)
        self.table = table.with_carried({n: self.reader.shape(n) for n in carried if carry})
        wanted = {name: shape for p in table.parameters for name, shape in p.hf}
        names -= carried
        refuse_unfit(directory, sorted(wanted.keys() - names), sorted(names - wanted.keys()), {
            name: (self.reader.shape(name), wanted[name]) for name in wanted.keys() & names})

    def dtype(self, parameter: Parameter) -> torch.dtype:
        found = {self.reader.dtype(name) for name, _ in parameter.hf}
        if len(found) > 1:
            raise CheckpointError(
                f"{[name for name, _ in parameter.hf]} are one parameter in Megatron, but have "
                f"dtypes {sorted(map(str, found))}", where=str(self.reader.directory),
                remedy="choose one with --dtype")
        return found.pop()

    def tensors(self, parameter: Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.reader.tensor(name)) for name, _ in parameter.hf)

    def prefetch(self, parameter: Parameter) -> None:
        for name, _ in parameter.hf:
            self.reader.prefetch(name)


class MegatronSource:
    """A distributed checkpoint, of a run or converted, as parameters of its model."""

    def __init__(self, table: ParameterTable, directory: Path, *, carry: bool = True):
        self.reader = TorchDistReader(directory / "weights")
        shapes = {key: tuple(found.size) for key, found in self.reader.tensors.items()}
        self.table = table.with_carried({key.removeprefix(CARRIED): shape for key, shape in
                                         shapes.items() if carry and key.startswith(CARRIED)})
        wanted = {piece.key: piece.global_shape for p in table.parameters for piece in p.pieces}
        padded = {piece.key for p in table.parameters if p.kind == "vocab" for piece in p.pieces}
        found = {key: shape for key, shape in shapes.items()
                 if not key.startswith(("optimizer.", CARRIED))}
        refuse_unfit(directory, sorted(wanted.keys() - found), sorted(found.keys() - wanted), {
            key: (found[key], wanted[key]) for key in wanted.keys() & found
            if not (key in padded and found[key][0] > wanted[key][0]
                    and found[key][1:] == wanted[key][1:])})

    def dtype(self, parameter: Parameter) -> torch.dtype:
        return self.reader.dtype(parameter.pieces[0].key)

    def tensors(self, parameter: Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        full = self.reader.read(parameter.pieces, parameter.shape)
        parts = split(parameter.kind, full, self.table.shape, self.table.vocab_size)
        return ((name, part) for (name, _), part in zip(parameter.hf, parts, strict=True))

    def prefetch(self, parameter: Parameter) -> None:
        self.reader.prefetch(parameter.pieces)


def refuse_unfit(directory: Path, missing: list[str], extra: list[str],
                 shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises CheckpointError with all differences between a checkpoint and its model.

    Args:
        shapes: by name, found and wanted.
    """
    wrong = [f"{name}: {found}, the model has {wanted}"
             for name, (found, wanted) in sorted(shapes.items()) if found != wanted]
    lines = []
    for what, names in (("missing", missing), ("without a place in the model", extra),
                        ("of another shape", wrong)):
        if names:
            lines += [f"  {len(names)} {what}:", *(f"    {name}" for name in names[:_LISTED])]
            lines += ["    ..."] * (len(names) > _LISTED)
    if lines:
        raise CheckpointError("\n".join(["the tensors are not those of config.json:", *lines]),
                              where=str(directory), remedy="is config.json of this checkpoint?")


class ToMegatron:
    """Hugging Face to a distributed checkpoint, which loads at any layout."""

    def __init__(self, source: HFSource, working: Path, dtype: torch.dtype | None,
                 shard_bytes: int):
        self.source, self.working, self.table = source, working, source.table
        self.records, self.dtype = Records(working), dtype
        units = [p.entries(dtype or source.dtype(p)) for p in self.table.parameters]
        self.files = plan_files(units, shard_bytes, "part-{number:05d}-of-{count:05d}.distcp")

    def write(self, file: ShardFile, report: Report) -> None:
        out, digests = TorchDistFile(self.working / "weights" / file.name, file), {}
        for parameter in read_ahead([self.table.parameters[unit] for unit in file.units],
                                    self.source.prefetch):
            tensors = {name: tensor.to(self.dtype or tensor.dtype)
                       for name, tensor in self.source.tensors(parameter)}
            digests |= digests_of(tensors.items())
            full = merge(parameter.kind, list(tensors.values()), self.table.shape)
            out.put(parameter.pieces, full.contiguous())
            report(full.nbytes)
        self.records.finish(out, file, digests)

    def close(self) -> None:
        self.records.wait()

    def finish(self) -> None:
        items = {file.name: self.records.read(file)["items"] for file in self.files}
        torch_dist.finish(self.working / "weights", items, self.table.objects)
        source = self.source.reader.directory
        copy_side_files(source, self.working)
        write_json(self.working / "conversion.json", {"tensors": self.records.digests(self.files)})
        write_json(self.working / "complete.json", {"converted_from": str(source)})

    def read_back(self, file: ShardFile) -> list[str]:
        found, written = {}, MegatronSource(self.source.base, self.working)
        for unit in file.units:
            found |= digests_of(written.tensors(self.table.parameters[unit]))
        return compare_digests(found, self.records.digests([file]))


class ToHF:
    """A distributed checkpoint to Hugging Face."""

    def __init__(self, source: MegatronSource, directory: Path, working: Path,
                 dtype: torch.dtype | None, shard_bytes: int):
        self.source, self.working, self.directory = source, working, directory
        self.dtype, self.table = dtype, source.table
        self.files = plan_hf_files([p.entries(dtype or source.dtype(p))
                                    for p in self.table.parameters], shard_bytes)
        self.out = HFFiles(working, self.files)

    def write(self, file: ShardFile, report: Report) -> None:
        for parameter in read_ahead([self.table.parameters[unit] for unit in file.units],
                                    self.source.prefetch):
            for name, tensor in self.source.tensors(parameter):
                self.out.put(name, tensor.to(self.dtype or tensor.dtype))
                report(tensor.nbytes)

    def close(self) -> None:
        self.out.close()

    def finish(self) -> None:
        finish_hf(self.working, self.files, self.directory)

    def read_back(self, file: ShardFile) -> list[str]:
        return read_back(self.working, [file])


def problems_of(source: HFSource | MegatronSource, parameter: Parameter,
                recorded: Mapping[str, str]) -> dict[str, list[str]]:
    """What is wrong with the values of one parameter, by kind of problem.

    Args:
        recorded: digests from when the checkpoint was written; empty: there are none.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in source.tensors(parameter):
        if not torch.isfinite(tensor).all():
            found["hold numbers that are not finite"].append(name)
        if name in recorded and file_digest(tensor.contiguous()) != recorded[name]:
            found["are not what was written"].append(name)
    return found
