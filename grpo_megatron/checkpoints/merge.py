"""A weighted mean of Hugging Face checkpoints of one shape, tensor by tensor."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from grpo_megatron.checkpoints import durable
from grpo_megatron.checkpoints.hf_export import HFTarget
from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.checkpoints.shard_files import DEFAULT_SHARD_BYTES
from grpo_megatron.errors import CheckpointError, MismatchError
from grpo_megatron.weights.transfer_plan import TensorEntry


def merge_checkpoints(weights: Mapping[Path, float], directory: Path, dtype: str | None = None,
                      shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write `sum_i w_i * checkpoint_i / sum_i w_i`, computed in float64, as `dtype` (default: that
    of the first); config and tokenizer are the first's. CheckpointError where tensors differ in
    name or shape, MismatchError where something else is read back than was written."""
    readers = {HFReader(path): weight / sum(weights.values()) for path, weight in weights.items()}
    first, *others = readers
    names = sorted(first.names())
    for reader, path in zip(others, list(weights)[1:], strict=True):
        other = sorted(reader.names() ^ first.names()) or [
            name for name in names if reader.shape(name) != first.shape(name)]
        if other:
            raise CheckpointError(f"{len(other)} tensors are not in both, or of other shapes, for "
                                  f"example {other[:3]}", where=str(path),
                                  remedy=f"merge checkpoints of the model in {next(iter(weights))}")
    kinds = {name: dtype or str(first.dtype(name)).removeprefix("torch.") for name in names}
    working = durable.working_directory(directory)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    target = HFTarget(working, [[TensorEntry(name, kinds[name], first.shape(name), 0)]
                                for name in names], shard_bytes)

    def mean(name: str) -> torch.Tensor:
        total = sum(weight * reader.tensor(name).double() for reader, weight in readers.items())
        return total.to(getattr(torch, kinds[name]))

    for file in target.files:
        target.write(file, ((entry.name, mean(entry.name)) for entry in file.entries))
    target.wait()
    target.finish(next(iter(weights)))
    if bad := [name for file in target.files for name in target.read_back(file)]:
        raise MismatchError(f"{len(bad)} tensors were read back as something else than was "
                            f"written, for example {bad[:3]}", where=str(directory))
    durable.commit(working, directory)
