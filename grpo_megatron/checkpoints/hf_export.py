"""Write a Hugging Face checkpoint from a stream of tensors. The directory appears when whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_megatron.errors import CheckpointError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".safetensors.index.json")


def export_checkpoint(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path,
                      source: Path, *, shard_bytes: int = 5 << 30) -> int:
    """Write `tensors` and copy config, tokenizer and template from `source` byte for byte.

    Returns:
        Bytes of weights written.

    Raises:
        CheckpointError: the stream was empty.
    """
    working = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    try:
        total = _write(tensors, working, source, shard_bytes)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(working, directory)
    _sync(directory.parent)
    return total


def _write(tensors: Iterable[tuple[str, torch.Tensor]], working: Path, source: Path,
           shard_bytes: int) -> int:
    """Everything durably into `working`; returns bytes of weights."""
    shards = _write_shards(tensors, working, shard_bytes)
    if not shards:
        raise CheckpointError("no tensor to export", where=str(working))
    total = _name_shards(shards, working)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, working / file.name)
    for file in working.iterdir():
        _sync(file)
    _sync(working)
    return total


def _write_shards(tensors, working: Path, shard_bytes: int) -> list[dict[str, int]]:
    """Files `part-<i>` of at most `shard_bytes`; returns tensor sizes in bytes per file."""
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0

    def flush():
        save_file(pending, working / f"part-{len(shards)}", {"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if pending:
        flush()
    return shards


def _name_shards(shards: list[dict[str, int]], working: Path) -> int:
    """Give the files their final names and write the index where there are several."""
    total = sum(sum(sizes.values()) for sizes in shards)
    if len(shards) == 1:
        os.replace(working / "part-0", working / "model.safetensors")
        return total
    weight_map = {}
    for number, sizes in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(working / f"part-{number}", working / name)
        weight_map.update(dict.fromkeys(sizes, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (working / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
