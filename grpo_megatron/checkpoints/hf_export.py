"""Write a Hugging Face checkpoint tensor by tensor, read it back, then give it its name.

All ranks of a sharded model write at once, each its own files.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from grpo_megatron.checkpoints.durable import (
    commit,
    copy_side_files,
    working_directory,
    write_json,
)
from grpo_megatron.checkpoints.shard_files import (
    Records,
    SafetensorsFile,
    ShardFile,
    compare_digests,
    digests_of,
    plan_files,
)
from grpo_megatron.errors import CheckpointError, MismatchError
from grpo_megatron.weights.digests import file_digest
from grpo_megatron.weights.gather import GatherEntry, hf_shapes, stream
from grpo_megatron.weights.layout import AttentionShape
from grpo_megatron.weights.shards import Shard
from grpo_megatron.weights.transfer_plan import TensorEntry

DEFAULT_SHARD_BYTES = 5 << 30
_PATTERN = "model-{number:05d}-of-{count:05d}.safetensors"


def plan_hf_files(units: Sequence[Sequence[TensorEntry]], shard_bytes: int) -> list[ShardFile]:
    """Files of at most `shard_bytes`, unless one unit is larger."""
    return plan_files(units, shard_bytes, _PATTERN, "model.safetensors")


class HFFiles:
    """Files that are open for tensors; a file that has all of its own is synced and recorded."""

    def __init__(self, working: Path, files: Sequence[ShardFile]):
        self.working, self.records = working, Records(working)
        self._place = {entry.name: file for file in files for entry in file.entries}
        self._open: dict[str, SafetensorsFile] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Any order; the tensor may be reused by the caller afterwards."""
        file = self._place[name]
        if file.name not in self._open:
            self._open[file.name] = SafetensorsFile(self.working / file.name, file)
        tensor = tensor.detach().to("cpu").contiguous()
        self._open[file.name].put(name, tensor)
        digests = self._digests.setdefault(file.name, {})
        digests[name] = file_digest(tensor)
        if len(digests) == len(file.entries):
            self.records.finish(self._open.pop(file.name), file, digests)

    def close(self) -> None:
        """Raises CheckpointError for files that did not get all of their tensors."""
        self.records.wait()
        for file in self._open.values():
            file.close()


def finish_hf(working: Path, files: Sequence[ShardFile], source: Path) -> None:
    """Index where there are several files, and what `source` has beside its weights."""
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(file.num_bytes for file in files)},
                 "weight_map": {e.name: file.name for file in files for e in file.entries}}
        write_json(working / "model.safetensors.index.json", index)
    copy_side_files(source, working)
    write_json(working / "conversion.json", {"tensors": Records(working).digests(files)})


def read_back(working: Path, files: Sequence[ShardFile]) -> list[str]:
    """Names of tensors that are not on the disk as they were given."""
    bad = []
    for file in files:
        with safe_open(working / file.name, "pt") as opened:
            found = digests_of((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        recorded = Records(working).digests([file])
        bad += compare_digests(found, recorded | {e.name: recorded.get(e.name, "")
                                                  for e in file.entries})
    return bad


def export_model(entries: Sequence[GatherEntry], shards: Sequence[Shard], shape: AttentionShape,
                 directory: Path, source: Path, *, vocab_size: int,
                 shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
    """Write a model that is spread over all ranks. Collective.

    Args:
        source: its config, tokenizer and template are copied byte for byte.

    Returns:
        Bytes of weights written.

    Raises:
        MismatchError: what was read back is not what the ranks hold.
        SetupError: the disk is full.
    """
    rank, world, working = dist.get_rank(), dist.get_world_size(), working_directory(directory)
    units = [[TensorEntry(name, str(entry.dtype).removeprefix("torch."), hf_shape)
              for name, hf_shape in hf_shapes(entry, shape, vocab_size)] for entry in entries]
    files = plan_hf_files(units, shard_bytes)
    if not files:
        raise CheckpointError("no tensor to export", where=str(directory))
    if rank == 0:
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
    dist.barrier()
    order = _interleaved(files, world)
    receivers = [number % world for number, _ in order]
    writer = HFFiles(working, files)
    for _, name, tensor in stream([entries[unit] for _, unit in order], shards, shape,
                                  vocab_size=vocab_size, receivers=receivers):
        writer.put(name, tensor)
    writer.close()
    dist.barrier()
    # Another rank reads than wrote: on two machines that shows what did not reach the disk.
    bad: list = [None] * world
    dist.all_gather_object(bad, read_back(working, files[(rank + 1) % world :: world]))
    refuse_differences([name for part in bad for name in part], directory)
    if rank == 0:
        finish_hf(working, files, source)
        commit(working, directory)
    dist.barrier()
    return sum(file.num_bytes for file in files)


def refuse_differences(names: Sequence[str], directory: Path) -> None:
    """Raises MismatchError unless `names`, those that were read back wrong, is empty."""
    if names:
        raise MismatchError(f"{len(names)} tensors were read back as something else than was "
                            f"written, for example {names[:3]}", where=str(directory),
                            remedy="look at the disk: other bytes came back than went there")


def _interleaved(files: Sequence[ShardFile], world: int) -> list[tuple[int, int]]:
    """(file, unit): `world` files grow together, so that no rank waits for another's file."""
    order = []
    for start in range(0, len(files), world):
        group = [[(start + i, unit) for unit in file.units]
                 for i, file in enumerate(files[start : start + world])]
        for step in range(max(map(len, group))):
            order += [units[step] for units in group if step < len(units)]
    return order
