"""A weighted mean of Hugging Face checkpoints of one shape, tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path

import torch

from grpo_megatron.checkpoints import durable
from grpo_megatron.checkpoints.hf_export import HFTarget
from grpo_megatron.checkpoints.hf_import import HFReader, refuse_unfit
from grpo_megatron.checkpoints.shard_files import DEFAULT_SHARD_BYTES
from grpo_megatron.errors import MismatchError
from grpo_megatron.files import empty_directory
from grpo_megatron.weights.transfer_plan import TensorEntry


def merge_checkpoints(
    weights: Mapping[Path, float],
    directory: Path,
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `sum_i w_i * checkpoint_i / sum_i w_i`, computed in float64, as `dtype` (default: that
    of the first); config and tokenizer are the first's. CheckpointError where tensors differ in
    name or shape, MismatchError where something else is read back than was written."""
    readers = {HFReader(path): weight / sum(weights.values()) for path, weight in weights.items()}
    (source, *paths), (first, *_) = weights, readers
    shapes, *others = ({name: r.shape(name) for name in sorted(r.names())} for r in readers)
    for path, found in zip(paths, others, strict=True):
        refuse_unfit(path, found, shapes, f"the model in {source}", "merge models of one shape")
    kinds = {name: dtype or str(first.dtype(name)).removeprefix("torch.") for name in shapes}
    working = empty_directory(durable.working_directory(directory))
    target = HFTarget(
        working,
        [[TensorEntry(name, kinds[name], first.shape(name), 0)] for name in shapes],
        shard_bytes,
    )

    def mean(name: str) -> torch.Tensor:
        total = torch.zeros(first.shape(name), dtype=torch.float64)
        for reader, weight in readers.items():
            total += weight * reader.tensor(name).double()
        return total.to(getattr(torch, kinds[name]))

    for file in target.files:
        target.write(file, ((entry.name, mean(entry.name)) for entry in file.entries))
    target.wait()
    target.finish(source)
    if bad := [name for file in target.files for name in target.read_back(file)]:
        raise MismatchError(
            f"{len(bad)} tensors were read back as something else than was "
            f"written, for example {bad[:3]}",
            where=str(directory),
        )
    durable.commit(working, directory)
