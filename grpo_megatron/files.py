"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`; also a machine that goes down leaves the old or the new text.

    A sampled text may hold half of a surrogate pair, which UTF-8 cannot write: it is escaped.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """`write_atomically` of bytes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def replace_directory(working: Path, final: Path) -> None:
    """Give a finished directory its name, in place of what had it."""
    shutil.rmtree(final, ignore_errors=True)
    working.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
