"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path`; also a machine that goes down leaves the old or the new text.

    A sampled text may hold half of a surrogate pair, which UTF-8 cannot write: it is escaped.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
