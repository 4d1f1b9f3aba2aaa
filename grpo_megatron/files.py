"""Files and directories that are there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`; also a machine that goes down leaves the old or the new text. Half of a
    surrogate pair, which a sampled text may hold and UTF-8 cannot write, is escaped."""
    with open_atomically(path) as file:
        file.write(text.encode(errors="backslashreplace"))


@contextmanager
def open_atomically(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends. Where that fails, what
    was written is removed.

    Raises FileExistsError where `path` exists and is to be `new`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if new:
            link_or_copy(partial, path)
        else:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name; its bytes are copied only where the file system has no hard links.

    Raises FileExistsError where something has that name."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with source.open("rb") as whole, target.open("xb") as copy:
            shutil.copyfileobj(whole, copy, 1 << 20)
        sync(target)


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield all files below a folder in order of their names, also through links to folders, but
    not through one to a folder that it lies in. above: these, resolved. Raises OSError where a
    folder cannot be read."""
    resolved = folder.resolve()
    if resolved in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from files_below(path, (*above, resolved))
        elif path.is_file():
            yield path


def remove_directory(path: Path) -> None:
    """Remove a directory, as far as that is possible; of a link to one only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def clear_directory(path: Path, kept: Collection[Path]) -> None:
    """Remove what is in a directory but the files `kept`. Of links, as to checkpoints on another
    disk, only the links go. Raises OSError for what cannot be removed."""
    for part in path.iterdir():
        if part in kept:
            continue
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink()


def empty_directory(path: Path) -> Path:
    """Make `path`, without what was there; returns it."""
    remove_directory(path)
    path.mkdir(parents=True)
    return path


def replace_directory(working: Path, final: Path) -> None:
    """Give a finished directory its name, in place of what had it; of a link only the link goes."""
    remove_directory(final)
    working.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
