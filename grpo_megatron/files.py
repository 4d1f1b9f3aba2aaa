"""Files and directories that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`; also a machine that goes down leaves the old or the new text. Half of a
    surrogate pair, which a sampled text may hold and UTF-8 cannot write, is escaped."""
    with open_atomically(path) as file:
        file.write(text.encode(errors="backslashreplace"))


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def empty_directory(path: Path) -> Path:
    """Make `path`, without what was there; returns it."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


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
