"""Checkpoints are read without running what is in them.

Distributed checkpoints have pickles in four places: `.metadata`, objects beside the tensors, the
tensors themselves and, of some releases of Megatron-Core, `common.pt`. torch 2.13 reads the first
two without a guard (torch/distributed/checkpoint/filesystem.py:930 and default_planner.py:387), and
a pickle may name any function to be called. Within `plain_data_only` all of them are read as plain
data: what names anything else is refused, before it is looked up."""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.errors import CheckpointError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's own switch: it holds for every `torch.load`, whatever the caller asks for."""
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (  # Megatron keeps the plans of all ranks
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset"),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
}
"""What an index may consist of: descriptions of tensors and of where they are."""
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
"""Kinds of constants of `torch` that an index may name."""
_NAMED = re.compile(r"GLOBAL (\S+)")
"""In what torch and `PlainUnpickler` say of a pickle that they refuse."""


class PlainUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint. Raises UnpicklingError for whatever else it names."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what an index may consist of."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"unsupported GLOBAL {module}.{name}")


def _load(file: IO[bytes]) -> Any:
    return PlainUnpickler(file).load()


@contextmanager
def plain_data_only(directory: Path) -> Iterator[None]:
    """Within the block the distributed checkpoint `directory` is read as plain data.

    Raises CheckpointError where it is more, by the name of what it would run, and nothing ran."""
    guarded = SimpleNamespace(**{**vars(pickle), "load": _load})
    with (
        refusals_named(directory),
        patch.object(filesystem, "pickle", guarded),
        _every_load_is_restricted(),
    ):
        yield


@contextmanager
def refusals_named(directory: Path) -> Iterator[None]:
    """Raise a CheckpointError by the name of what a restricted load inside the block refused: torch
    advises to load such a file without restrictions."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        named = _refused_name(error)
        if named is None:
            raise
        raise CheckpointError(
            f"it names {named}, which no checkpoint needs: it could run code, and was not read",
            where=str(directory),
            remedy="do not use it, and find out who wrote it",
        ) from error


@contextmanager
def _every_load_is_restricted() -> Iterator[None]:
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _refused_name(error: BaseException) -> str | None:
    """Return what a pickle named that was refused; None where the error is another one."""
    errors = [error]
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            errors.append(failure)
    for each in errors:
        found = _NAMED.search(str(each))
        if found is not None:
            return found[1].rstrip(".,;")
    return None
