"""Read a Hugging Face checkpoint into a sharded model: each rank reads what it has parts of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.weights.layout import AttentionShape, merge, shard, split
from grpo_megatron.weights.rules import Rule, carried_names, resolve
from grpo_megatron.weights.shards import Shard


class HFReader:
    """Named tensors of a safetensors checkpoint, memory-mapped.

    Raises:
        CheckpointError: no safetensors, a shard is missing, or a file is truncated.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, safe_open] = {}
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self.files = _read_index(index)
            missing = {f for f in self.files.values() if not (directory / f).exists()}
            if missing:
                raise CheckpointError(f"missing shards: {sorted(missing)}", where=str(directory))
        elif (directory / "model.safetensors").exists():
            names = self._open("model.safetensors").keys()
            self.files = dict.fromkeys(names, "model.safetensors")
        else:
            raise CheckpointError("no model.safetensors and no index", where=str(directory),
                                  remedy="give a Hugging Face checkpoint in safetensors format")

    def names(self) -> set[str]:
        return set(self.files)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise CheckpointError(f"tensor {name!r} is missing", where=str(self.directory))
        file = self.files[name]
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {name!r} from {file}: {error}",
                                  where=str(self.directory)) from error

    def _open(self, file: str):
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.directory / file, "pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"unreadable shard {file}: {error}",
                                      where=str(self.directory)) from error
        return self._files[file]


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"unreadable index: {error!r}", where=str(path)) from error


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
        tensors = [reader.tensor(name) for name in names]
        model = split(kind, torch.empty(part.full_shape, device="meta"), shape, vocab_size)
        for name, tensor, wanted in zip(names, tensors, model, strict=True):
            if tensor.shape != wanted.shape:
                raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model "
                                      f"has {tuple(wanted.shape)}", where=str(directory))
        full = merge(kind, tensors, shape)
        used.update(names)
        if kind == "vocab":
            padding = part.full_shape[0] - full.shape[0]
            full = torch.nn.functional.pad(full, (0, 0, 0, padding))
        part.tensor.copy_(shard(kind, full, part.dim, part.size, part.rank))
    return used


def check_all_used(directory: Path, used: set[str]) -> None:
    """`used`: names read by any rank. Raises CheckpointError for tensors nobody wanted."""
    names = HFReader(directory).names()
    extra = names - used - carried_names(read_config(directory), names)
    if extra:
        raise CheckpointError(f"{len(extra)} tensors have no place in the model, for example "
                              f"{sorted(extra)[:3]}", where=str(directory))
