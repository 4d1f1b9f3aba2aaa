"""Checkpoint directories under work: a temporary name, side files, full disks."""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.checkpoints.retention import DIGESTS, UNFINISHED
from grpo_megatron.errors import CheckpointError, GrpoMegatronError, SetupError
from grpo_megatron.files import replace_directory, sync, write_atomically

PROGRESS = ".progress"
"""Inside a working directory: one record a finished file. Not part of the result."""

_NOT_COPIED = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".index.json",
    "complete.json",
    "conversion.json",
    DIGESTS,
    ".lock",
)
"""Ends of names of what is about the weights themselves, which are written anew."""
_DTYPE_FIELDS = ("dtype", "torch_dtype")
"""What transformers calls the dtype of weights in a config.json, since and before its version 5."""
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Where transformers keeps the named templates of a tokenizer that has several."""


def working_directory(final: Path) -> Path:
    """Return where `final` is built; it survives a kill, so that a conversion can go on."""
    return final.with_name(final.name + UNFINISHED)


def write_json(path: Path, value: Any) -> None:
    """Write `value` durably, and never half. Raises SetupError when the disk is full."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value, indent=1))


def copy_side_files(source: Path, target: Path, dtype: str | None = None) -> None:
    """Copy config, tokenizer and templates: everything beside the weights, byte for byte; of
    folders only that of additional templates.

    Only a config.json that says the weights are quantised loses that: ours never are. And where
    all weights have been given a `dtype`, it says that one wherever it says one. Raises SetupError
    when the disk is full."""
    for file in sorted([*source.iterdir(), *source.glob(_MORE_TEMPLATES)]):
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            copy = target / file.relative_to(source)
            with disk_errors(target):
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    config = json.loads((target / "config.json").read_text(encoding="utf-8-sig"))
    written = deepcopy(config)
    if written.get("quantization_config") is not None:
        del written["quantization_config"]
    if dtype is not None:
        _state_dtype(written, dtype)
    if written != config:
        write_json(target / "config.json", written)


def _state_dtype(config: dict[str, Any], dtype: str) -> None:
    """Let a config.json say `dtype` wherever it says one: engines and transformers load weights
    as what stands there."""
    for name, value in config.items():
        if isinstance(value, dict):  # of the text, or of the tower of a model that sees
            _state_dtype(value, dtype)
        elif name in _DTYPE_FIELDS and value is not None:
            config[name] = dtype


def commit(working: Path, final: Path) -> None:
    """Sync everything and give `working` its final name, in place of what was there."""
    shutil.rmtree(working / PROGRESS, ignore_errors=True)
    (working / ".lock").unlink(missing_ok=True)
    for path in (*working.rglob("*"), working):
        sync(path)
    replace_directory(working, final)


@contextmanager
def explained(what: str, where: Path, remedy: str | None = None) -> Iterator[None]:
    """Raise a CheckpointError for what libraries raise over a damaged file inside the block."""
    try:
        yield
    except GrpoMegatronError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(
            f"{what}: {type(error).__name__}: {error}", where=str(where), remedy=remedy
        ) from error


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Raise a SetupError where a write inside the block fails because the disk is full."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        if not isinstance(error, OSError):
            # torch.save raises a RuntimeError of its own while it closes the broken archive
            cause = error.__context__
        if getattr(cause, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SetupError(
            f"cannot write: {getattr(cause, 'strerror', cause)}",
            where=str(where),
            remedy="make room; a conversion goes on where it stopped",
        ) from error
