"""Read a Hugging Face checkpoint into a sharded model: each rank reads the slices that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from grpo_megatron.checkpoints.hf_reader import HFReader
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.weights.layout import AttentionShape, merge, shard, split
from grpo_megatron.weights.rules import Rule, carried_names, resolve
from grpo_megatron.weights.shards import Shard

_PADDING = -1

@torch.no_grad()
def import_weights(shards: Sequence[Shard], rules: tuple[Rule, ...], shape: AttentionShape,
                   directory: Path, *, vocab_size: int, tied_embeddings: bool) -> set[str]:
    """Fill every parameter; returns the Hugging Face names that this rank read.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model.
    """
    reader, used = HFReader(directory), set()
    for part in shards:
        kind, names = resolve(rules, part.name)
        if tied_embeddings and names == ["lm_head.weight"]:
            names = ["model.embed_tokens.weight"]
        check_shapes(reader, names, split(kind, torch.empty(part.full_shape, device="meta"),
                                          shape, vocab_size))
        _fill(part, reader, kind, names, shape)
        used.update(names)
    return used


def check_shapes(reader: HFReader, names: Sequence[str], model: Sequence[torch.Tensor]) -> None:
    """Raises CheckpointError for a tensor that is missing or not of the model's shape."""
    for name, wanted in zip(names, model, strict=True):
        if reader.shape(name) != tuple(wanted.shape):
            raise CheckpointError(f"tensor {name!r} has shape {reader.shape(name)}, the model "
                                  f"has {tuple(wanted.shape)}", where=str(reader.directory))


def _fill(part: Shard, reader: HFReader, kind: str, names: Sequence[str],
          shape: AttentionShape) -> None:
    """Copy run by run: layouts move whole rows, so they are asked where each row comes from."""
    starts = torch.tensor([0] + [reader.shape(name)[0] for name in names]).cumsum(0)
    rows = merge(kind, [torch.arange(a, b)[:, None] for a, b in pairwise(starts)], shape)
    padding = part.full_shape[0] - len(rows)  # of the vocabulary
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding), value=_PADDING)
    columns = None
    if part.dim == 1:
        width = part.tensor.shape[1]
        columns = slice(part.rank * width, (part.rank + 1) * width)
    else:
        rows = shard(kind, rows, part.dim, part.size, part.rank)
    for start, end, index, first in _runs(rows[:, 0], starts):
        if first == _PADDING:
            part.tensor[start:end].zero_()
            continue
        found = reader.rows(names[index], first, first + end - start)
        part.tensor[start:end].copy_(found if columns is None else found[:, columns])


def _runs(rows: torch.Tensor, starts: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Cut `rows` (int64 [n], counted over all tensors) into pieces that lie together in one.

    Yields:
        Start and end in `rows`, which tensor, its first row.
    """
    owner = torch.bucketize(rows, starts[1:], right=True)
    cuts = ((rows.diff() != 1) | owner.diff().bool()).nonzero()[:, 0] + 1
    for start, end in pairwise([0, *cuts.tolist(), len(rows)]):
        index = int(owner[start])
        yield start, end, index, int(rows[start] - starts[index])


def check_all_used(directory: Path, used: set[str]) -> None:
    """`used`: names read by any rank. Raises CheckpointError for tensors nobody wanted."""
    names = HFReader(directory).names()
    extra = names - used - carried_names(read_config(directory), names)
    if extra:
        raise CheckpointError(f"{len(extra)} tensors have no place in the model, for example "
                              f"{sorted(extra)[:3]}", where=str(directory))
