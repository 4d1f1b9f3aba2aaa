"""Megatron distributed checkpoints (`torch_dist`): saved at one layout, loaded at another.

step_000100/weights/       distributed checkpoint: model, optimizer
step_000100/complete.json  without it the checkpoint does not exist
step_000100/digests.json   of every file, as it was read back from disk
reference_step_000100/     reference weights, written when new; checkpoints name theirs"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model

from grpo_megatron.batching.columns import file_checksum
from grpo_megatron.checkpoints.durable import copy_side_files, explained, write_json
from grpo_megatron.checkpoints.retention import DIGESTS
from grpo_megatron.files import empty_directory, replace_directory
from grpo_megatron.weights.gather import all_gathered, on_rank_0

COMPLETE = "complete.json"


def save_checkpoint(
    directory: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    state: dict[str, Any],
    source: Path | None = None,
) -> None:
    """Write model and optimizer, then `state` and with it the mark that all is there.

    Config, tokenizer and template of `source`, a Hugging Face directory, are copied. Raises
    SetupError when the disk is full. Collective."""
    with _atomic_directory(directory) as working:
        on_rank_0((working / "weights").mkdir)
        dist_checkpointing.save(_sharded_state(chunks, optimizer), str(working / "weights"))
        dist.barrier()
        if source is not None:
            on_rank_0(copy_side_files, source, working)
        on_rank_0(write_json, working / COMPLETE, state)


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a working directory that takes the place of `directory` in the end. Collective."""
    working = directory.with_name(directory.name + ".tmp")
    on_rank_0(empty_directory, working)
    yield working
    dist.barrier()
    names = []
    for path in working.rglob("*"):
        if path.is_file():
            names.append(str(path.relative_to(working)))
    names_on_rank_0 = all_gathered(names)[0]  # nodes may list differently
    on_rank_0(write_json, working / DIGESTS, _digests(working, sorted(names_on_rank_0)))
    on_rank_0(replace_directory, working, directory)


def corrupt_files(directory: Path) -> list[str]:
    """Name the files that are not as they were written; none of a whole checkpoint. Collective."""
    try:
        written = json.loads((directory / DIGESTS).read_text())
    except (OSError, ValueError):
        return [DIGESTS]
    found = _digests(directory, sorted(written))
    return [name for name in sorted(written) if found[name] != written[name]]


def _digests(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return [bytes, digest] of files as they are on disk; every rank reads its share. Collective.

    A file that cannot be read has None."""
    own_names = names[dist.get_rank() :: dist.get_world_size()]
    own_share = {name: _digest(directory / name) for name in own_names}
    found = {}
    for share in all_gathered(own_share):
        found.update(share)
    return found


def _digest(path: Path) -> list[Any] | None:
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # and drop what is cached, so that the disk answers
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return [path.stat().st_size, file_checksum(path)]
    except OSError:
        return None


def load_checkpoint(directory: Path, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Fill model and optimizer, which must have a state to load into. Collective.

    Raises CheckpointError where the checkpoint is incomplete, or of another model."""
    read_state(directory)
    state = _sharded_state(chunks, optimizer, is_loading=True)
    optimizer.load_state_dict(_fill(chunks, state, directory / "weights")["optimizer"])


def save_model(directory: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Write the model's weights alone. Collective."""
    with _atomic_directory(directory) as working:
        dist_checkpointing.save(model_state(chunks), str(working))


def load_model(directory: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill the model from `save_model`'s files, written at any layout. Collective.

    Raises CheckpointError where they cannot be read, or are of another model."""
    _fill(chunks, model_state(chunks), directory)


def _fill(
    chunks: Sequence[torch.nn.Module], state: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Load `state`, of which the model is a part; return all of it."""
    with explained("cannot load", directory, remedy="resume from the checkpoint before it"):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    for key, model in _by_key(chunks).items():
        model.load_state_dict(loaded[key], strict=True)
    return loaded


def read_state(directory: Path) -> dict[str, Any]:
    """Return what was saved beside the weights.

    Raises CheckpointError for an incomplete checkpoint."""
    with explained("not a complete checkpoint", directory):
        state: dict[str, Any] = json.loads((directory / COMPLETE).read_text())
    return state


def _by_key(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return Megatron's modules by their key in a checkpoint."""
    models = unwrap_model(list(chunks))
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{index}": model for index, model in enumerate(models)}


def _sharded_state(
    chunks: Sequence[torch.nn.Module], optimizer: Any, *, is_loading: bool = False
) -> dict[str, Any]:
    """Return Megatron's description of model and optimizer."""
    state = model_state(chunks)
    described = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata())
    return {**state, "optimizer": described}


def model_state(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return Megatron's description of every parameter, by model chunk."""
    described = {}
    for key, model in _by_key(chunks).items():
        described[key] = model.sharded_state_dict(metadata=_metadata())
    return described


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
