"""Megatron distributed checkpoints (`torch_dist`): saved at one layout, loaded at another.

step_000100/weights/       distributed checkpoint: model, optimizer
step_000100/adapters/MATH/ adapters of one domain with their optimizer, where each has its own
step_000100/critic/        model and optimizer of a run's critic, which nothing else reads
step_000100/complete.json  without it the checkpoint is damaged
step_000100/digests.json   of every file, as it was read back from disk
reference_step_000100/     reference weights, written when new; checkpoints name theirs
  remainder/               what a moving average of them is beyond their dtype

A save copies what it saves, and its files are written beside what the trainer does next
(`PendingCheckpoint`)."""

import contextlib
import errno
import inspect
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.batching.columns import file_checksum
from grpo_megatron.checkpoints.durable import copy_side_files, explained, write_json
from grpo_megatron.checkpoints.plain_pickles import plain_data_only
from grpo_megatron.checkpoints.retention import COMPLETE, DIGESTS
from grpo_megatron.errors import SetupError
from grpo_megatron.files import empty_directory, replace_directory
from grpo_megatron.weights.gather import all_gathered, on_rank_0
from grpo_megatron.weights.parameters import is_beside_weights

CRITIC = "critic"

_RATES = ("max_lr", "min_lr")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint.

    folder: below the checkpoint's directory; chunks: of the model; optimizer: None: it is no part;
    holds: of the model's parameters all, only those of adapters, or all but these."""

    folder: str
    chunks: Sequence[torch.nn.Module]
    optimizer: Any = None
    holds: Literal["all", "adapters", "weights"] = "all"

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Return Megatron's description of it. Collective."""
        whole = model_state(self.chunks)
        described: dict[str, Any] = {}
        for key, parameters in whole.items():
            described[key] = self._held(parameters)
        if self.optimizer is not None:
            described["optimizer"] = self.optimizer.sharded_state_dict(
                whole, is_loading=is_loading, metadata=_metadata()
            )
        return described

    def _held(self, parameters: dict[str, Any]) -> dict[str, Any]:
        if self.holds == "all":
            return parameters
        wants_adapters = self.holds == "adapters"
        held = {}
        for name, tensor in parameters.items():
            if is_beside_weights(name) == wants_adapters:
                held[name] = tensor
        return held


class PendingCheckpoint:
    """A checkpoint that is being written; it exists once `finish` has returned.

    What it saves is copied to host memory when it is made: training may go on at once. Each rank
    writes its files in a thread and reads them back for their digests."""

    def __init__(
        self,
        directory: Path,
        parts: Iterable[Part],
        state: dict[str, Any],
        source: Path | None = None,
        mark: Callable[[Path], None] | None = None,
    ):
        """Begin to write each of `parts`, which is copied before the next one is asked for; `state`
        follows with the mark that all is there.

        Config, tokenizer and template of `source`, a Hugging Face directory, are copied; `mark`
        changes the copies, in the directory that it is given. Collective."""
        self.directory = directory
        self._state = state
        self._source = source
        self._mark = mark
        self._working = _working_directory(directory)
        on_rank_0(empty_directory, self._working)
        self._requests: dict[str, Any] = {}
        for part in parts:
            folder = self._working / part.folder
            on_rank_0(partial(folder.mkdir, parents=True))
            request = _asynchronous_save(part.state(), folder)
            _stage(request)
            self._requests[part.folder] = request
        self._digests: dict[str, Any] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()
        if not _writes_in_threads():
            self._thread.join()

    def _write(self) -> None:
        """Write this rank's files, and take their digests."""
        try:
            names = []
            for folder, request in self._requests.items():
                if request.async_fn is not None:
                    request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
                for path in (self._working / folder).glob(f"__{dist.get_rank()}_*"):
                    names.append(str(path.relative_to(self._working)))
            for name in names:
                self._digests[name] = _digest_on_disk(self._working / name)
        except Exception as error:
            logger.exception("cannot write %s", self._working)
            self._error = error

    def is_written(self) -> bool:
        """Tell whether `finish` would find the files of all ranks written. Collective."""
        return not any(all_gathered(self._thread.is_alive()))

    def finish(self) -> None:
        """Wait for the files, and give the checkpoint its name. Collective.

        Raises SetupError on every rank where one could not write, as on a full disk."""
        self._thread.join()
        has_failed = any(all_gathered(self._error is not None))
        if not has_failed:
            has_failed = not self._finalized()
        if has_failed:
            raise _unwritten(self._working)
        if self._source is not None:
            on_rank_0(copy_side_files, self._source, self._working)
        if self._mark is not None:
            on_rank_0(self._mark, self._working)
        on_rank_0(write_json, self._working / COMPLETE, self._state)
        _finish_directory(self._working, self.directory, self._digests)

    def _finalized(self) -> bool:
        """Have Megatron gather what was written, and write its index; False where it reports a
        failure, which it does on every rank. Collective."""
        try:
            for request in self._requests.values():
                for finalize in request.finalize_fns:
                    finalize()
        except CheckpointException:  # which is no Exception
            logger.exception("cannot write %s", self._working)
            return False
        return True


def _asynchronous_save(described: dict[str, Any], directory: Path) -> Any:
    """Return Megatron's `AsyncRequest`: what to write, where, and what follows. Collective."""
    arguments: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        arguments["async_strategy"] = "mcore"  # the other one is a package of its own
    return dist_checkpointing.save(described, str(directory), **arguments)


_WriteItem = Any
"""Megatron's record of what a tensor is and where in its file it goes."""
_Bucket = tuple[Path, str, tuple[list[Any], list[tuple[_WriteItem, torch.Tensor]]]]
"""What Megatron writes into one file: its path, its key, and (objects, tensors)."""


def _stage(request: Any) -> None:
    """Replace the tensors that a request writes by copies in host memory.

    request: Megatron's `AsyncRequest`; the second of its three arguments is a list of `_Bucket`s
    with the tensors as they are. Its `preload_fn` returns the same list with tensors in host
    memory, which are the very same where they were there already."""
    if request.preload_fn is None:
        return
    _, buckets, _ = request.async_fn_args
    originals = {id(tensor) for tensor in _tensors_in(buckets)}
    staged: list[_Bucket] = []
    for file, key, (objects, tensors) in request.preload_fn():
        copies = []
        for item, tensor in tensors:
            if id(tensor) in originals:  # host memory already: the weight itself
                tensor = tensor.clone()
            copies.append((item, tensor))
        staged.append((file, key, (objects, copies)))
    buckets[:] = staged  # the writer has this list too


def _tensors_in(buckets: Sequence[_Bucket]) -> Iterator[torch.Tensor]:
    """Yield all tensors that are to be written."""
    for _, _, (_, tensors) in buckets:
        for _, tensor in tensors:
            yield tensor


def _writes_in_threads() -> bool:
    """Whether Megatron writes in threads. Megatron-Core 0.16.1 forks processes, which may not be
    done beside other threads: there a checkpoint is written before training goes on."""
    return hasattr(FileSystemWriterAsync, "write_preloaded_data_multithread")


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a working directory that takes the place of `directory` in the end. Collective."""
    working = _working_directory(directory)
    on_rank_0(empty_directory, working)
    yield working
    _finish_directory(working, directory, {})


def _working_directory(directory: Path) -> Path:
    return directory.with_name(directory.name + ".tmp")


def _finish_directory(working: Path, directory: Path, known: Mapping[str, Any]) -> None:
    """Write the digests of all files, of which this rank knows some, and give `working` the name
    `directory`. Collective.

    Raises SetupError on every rank where a file cannot be written out or read back."""
    dist.barrier()
    names = []
    for path in working.rglob("*"):
        if path.is_file() and path != working / DIGESTS:
            names.append(str(path.relative_to(working)))
    names_on_rank_0 = sorted(all_gathered(names)[0])  # nodes may list differently
    found: dict[str, Any] = {}
    for share in all_gathered(known):
        found.update(share)
    unknown = [name for name in names_on_rank_0 if name not in found]
    found.update(_digests(working, unknown))
    digests = {name: found[name] for name in names_on_rank_0}
    for name, digest in digests.items():
        if digest is None:
            raise _unwritten(working / name)
    on_rank_0(write_json, working / DIGESTS, digests)
    on_rank_0(replace_directory, working, directory)


def corrupt_files(directory: Path) -> list[str]:
    """Name the files that are not as they were written; none of a whole checkpoint. Collective."""
    try:
        written = json.loads((directory / DIGESTS).read_text())
    except (OSError, ValueError, RecursionError):
        return [DIGESTS]
    if not isinstance(written, dict) or not written:  # something else than digests
        return [DIGESTS]
    found = _digests(directory, sorted(written))
    corrupt = []
    for name in sorted(written):
        if found[name] is None or found[name] != written[name]:
            corrupt.append(name)
    return corrupt


def _unwritten(path: Path) -> SetupError:
    return SetupError(
        "the weights of a checkpoint could not be written",
        where=str(path),
        remedy="look whether the disk is full (the log of the rank that failed has the reason), "
        "make room and resume: the checkpoints before it are whole",
    )


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
        return _digest_on_disk(path)
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error)
        return None


def _digest_on_disk(path: Path) -> list[Any]:
    """Return [bytes, digest] of a file, read from its disk. OSError where that cannot be."""
    with open(path, "rb") as file:
        _drop_from_cache(file.fileno())
    return [path.stat().st_size, file_checksum(path)]


def _drop_from_cache(number: int) -> None:
    """Let the disk answer what is read next. Images that can only be read, as of squashfs, have
    nothing to write out and know no such call. OSError where writing fails."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise
    with contextlib.suppress(OSError):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def load_checkpoint(directory: Path, part: Part) -> None:
    """Fill the model from one of the checkpoint's parts, and the part's optimizer, if it has one,
    which must have a state to load into. Collective.

    Raises CheckpointError where the checkpoint is incomplete, or of another model."""
    read_state(directory)
    state = part.state(is_loading=True)
    filled = _fill(
        part.chunks, state, directory / part.folder, leaves_weights=part.holds == "adapters"
    )
    if part.optimizer is not None:
        saved = filled["optimizer"]
        _take_rates(saved, part.optimizer.param_groups)
        part.optimizer.load_state_dict(saved)


def _take_rates(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Put the learning rates with which an optimizer was made into the parameter groups of a saved
    one: Megatron finds a group by them among others, although every step sets the rate, and a
    resume may have another one.

    saved: of one optimizer, or of several by their places; groups: of the optimizer, which has one
    rate for all."""
    if not isinstance(saved, Mapping) or not groups:  # without groups nothing is trained here
        return
    for key, value in saved.items():
        if key == "param_groups":
            for group in value:
                for name in _RATES:
                    group[name] = groups[0].get(name)
        else:
            _take_rates(value, groups)


def save_models(
    directory: Path,
    chunks: Sequence[torch.nn.Module],
    parts: Mapping[str, AbstractContextManager[None]],
) -> None:
    """Write weights alone: by the folder below `directory` that gets them, those that the model has
    within a block. Collective."""
    with _atomic_directory(directory) as working:
        for folder, with_weights in parts.items():
            on_rank_0(partial((working / folder).mkdir, exist_ok=True))
            with with_weights:
                dist_checkpointing.save(model_state(chunks), str(working / folder))


def load_model(
    directory: Path, chunks: Sequence[torch.nn.Module], *, weights_alone: bool = False
) -> None:
    """Fill the model from a folder of `save_models`, written at any layout. Collective.

    weights_alone: leaves adapters and a value head, if the model has them, as they are. Raises
    CheckpointError where the files cannot be read, or are of another model."""
    state = model_state(chunks)
    if weights_alone:
        for part in state.values():
            for name in list(part):
                if is_beside_weights(name):
                    del part[name]
    _fill(chunks, state, directory)


def _fill(
    chunks: Sequence[torch.nn.Module],
    state: dict[str, Any],
    directory: Path,
    *,
    leaves_weights: bool = False,
) -> dict[str, Any]:
    """Load `state`, of which the model is a part; return all of it.

    leaves_weights: the model keeps its weights where `state` has none."""
    remedy = "resume from the checkpoint before it"
    with explained("cannot load", directory, remedy=remedy), plain_data_only(directory):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    for key, model in _by_key(chunks).items():
        left_out = {}
        for name, tensor in model.state_dict().items():
            may_be_left = leaves_weights or is_beside_weights(name)
            if may_be_left and name not in loaded[key]:
                left_out[name] = tensor
        model.load_state_dict(loaded[key] | left_out, strict=True)
    return loaded


def read_state(directory: Path) -> dict[str, Any]:
    """Return what was saved beside the weights.

    Raises CheckpointError for an incomplete checkpoint."""
    with explained("not a complete checkpoint", directory):
        state: dict[str, Any] = json.loads((directory / COMPLETE).read_text())
        if not isinstance(state, dict):
            raise ValueError(f"{COMPLETE} is no table")
    return state


def _by_key(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return Megatron's modules by their key in a checkpoint."""
    models = unwrap_model(list(chunks))
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{index}": model for index, model in enumerate(models)}


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
