"""Hugging Face checkpoints held against a model, and read into one that is spread over ranks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from grpo_megatron.checkpoints.hf_reader import HFReader
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import Parameter, carried_parameter
from grpo_megatron.weights.rules import carried_names

_LISTED = 20
Shape = tuple[int, ...]


class HFSource:
    """A Hugging Face checkpoint as the parameters of a model.

    Raises CheckpointError for other tensors or shapes than the model's. With `carry`, also what the
    checkpoint has and Megatron's model has not (`carried_names`)."""

    def __init__(self, parameters: Sequence[Parameter], directory: Path, *, carry: bool = True):
        self.reader = reader = HFReader(directory)
        reader.check_index()
        found = {name: reader.shape(name) for name in sorted(reader.names())}
        carried = {n: found.pop(n) for n in sorted(carried_names(read_config(directory), found))}
        refuse_unfit(directory, found, {name: shape for p in parameters for name, shape in p.hf})
        self.parameters = [*parameters, *(carried_parameter(*c) for c in carried.items() if carry)]

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


def refuse_unfit(directory: Path, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises CheckpointError with all differences between a checkpoint and its model."""
    other = [f"{name}: {found[name]}, the model has {shape}" for name, shape in wanted.items()
             if found.get(name, shape) != shape]
    lines = []
    for what, names in (("missing", wanted.keys() - found.keys()), ("of another shape", other),
                        ("without a place in the model", found.keys() - wanted.keys())):
        if names:
            listed = [f"    {name}" for name in sorted(names)]
            lines += [f"  {len(names)} {what}:", *listed[:_LISTED]]
            lines += ["    ..."] * (len(names) > _LISTED)
    if lines:
        raise CheckpointError("\n".join(["the tensors are not those of config.json:", *lines]),
                              where=str(directory), remedy="is config.json of this checkpoint?")


@torch.no_grad()
def import_weights(model: ShardedModel, directory: Path) -> None:
    """Fill every parameter; each rank copies the rows and columns that it holds. Collective."""
    reader = HFSource([entry.parameter for entry in model.entries], directory).reader
    for part in model.shards:
        parameter = model.map.parameter(part.name, part.full_shape)
        parts = part.size if part.dim == 0 else 1
        merged = parameter.merge([_held(reader, name, shape[0], part)
                                  for name, shape in parameter.hf], parts)
        part.tensor[: len(merged)] = merged
        part.tensor[len(merged) :] = 0  # padding of the vocabulary


def _held(reader: HFReader, name: str, rows: int, part: Shard) -> torch.Tensor:
    """What this rank holds of a tensor; a view of the mapped file."""
    if part.dim == 1:
        return reader.tensor(name).chunk(part.size, 1)[part.rank]
    count = -(-rows // part.size)  # padding is at the end
    return reader.rows(name, min(part.rank * count, rows), min((part.rank + 1) * count, rows))
