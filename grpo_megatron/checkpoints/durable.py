"""Directories that are whole or absent: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_megatron.errors import SetupError

PROGRESS = ".progress"
"""Inside a working directory: one record a finished file. Not part of the result."""

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_OURS = ("complete.json", "conversion.json", ".lock")


def working_directory(final: Path) -> Path:
    """Where `final` is built; survives a kill, so that a conversion can go on."""
    return final.with_name(final.name + ".partial")


def write_json(path: Path, value: Any) -> None:
    """Durably, and never half: readers see the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".new")
    with disk_errors(path), open(partial, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def copy_side_files(source: Path, target: Path) -> None:
    """Config, tokenizer, template: everything beside the weights, byte for byte.

    Only a config.json that says the weights are quantised loses that: ours never are.
    """
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name not in _OURS:
            with disk_errors(target):
                shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is not None:
        write_json(target / "config.json", config)


def commit(working: Path, final: Path) -> None:
    """Sync everything and give `working` its final name, in place of what was there."""
    shutil.rmtree(working / PROGRESS, ignore_errors=True)
    (working / ".lock").unlink(missing_ok=True)
    for path in (*working.rglob("*"), working):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(working, final)
    sync(final.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """A full disk is the machine's fault, not ours: SetupError instead of OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SetupError(f"cannot write: {error.strerror}", where=str(where),
                         remedy="make room; a conversion goes on where it stopped") from error
