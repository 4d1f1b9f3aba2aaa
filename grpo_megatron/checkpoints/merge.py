"""A weighted mean of Hugging Face checkpoints of one shape, tensor by tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from grpo_megatron.checkpoints import durable
from grpo_megatron.checkpoints.hf_export import HFTarget
from grpo_megatron.checkpoints.hf_import import HFReader, refuse_unfit
from grpo_megatron.checkpoints.shard_files import (
    DEFAULT_SHARD_BYTES,
    NamedTensors,
    refuse_misread,
)
from grpo_megatron.checkpoints.stacked_experts import stacks_in
from grpo_megatron.files import empty_directory
from grpo_megatron.weights.tensor_entry import TensorEntry


def merge_checkpoints(
    weights: Mapping[Path, float],
    directory: Path,
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `sum_i w_i * checkpoint_i / sum_i w_i`, computed in float64, as `dtype` (default: that
    of the first); config and tokenizer are the first's.

    Raises CheckpointError where tensors differ in name or shape, MismatchError where something else
    is read back than was written."""
    readers = {HFReader(path): weight / sum(weights.values()) for path, weight in weights.items()}
    first = next(iter(readers))
    shapes = first.shapes()
    for reader in readers:
        if reader is not first:
            refuse_unfit(
                reader.directory,
                reader.shapes(),
                shapes,
                f"the model in {first.directory}",
                "merge models of one shape",
            )
    entries = []
    for name, shape in shapes.items():
        kind = dtype or str(first.dtype(name)).removeprefix("torch.")
        entries.append(TensorEntry(name, kind, shape))
    working = empty_directory(durable.working_directory(directory))
    units = [[entry] for entry in entries]
    target = HFTarget(working, units, shard_bytes, stacks_in(first.directory))
    for file in target.files:
        target.write(file, _means(readers, file.entries))
    target.wait()
    target.finish(first.directory)
    bad: list[str] = []
    for file in target.files:
        bad += target.read_back(file)
    refuse_misread(bad, directory)
    durable.commit(working, directory)


def _means(readers: Mapping[HFReader, float], entries: Sequence[TensorEntry]) -> NamedTensors:
    """Yield names and weighted means of the tensors `entries`; weights sum to 1."""
    for entry in entries:
        total = torch.zeros(entry.shape, dtype=torch.float64)
        for reader, weight in readers.items():
            total += weight * reader.tensor(entry.name).double()
        yield entry.name, total.to(entry.torch_dtype)
