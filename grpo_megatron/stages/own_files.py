"""Files of the user's own that a recipe names beside its models and data sets: what stages are made
from, too."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpo_megatron
from grpo_megatron import assets
from grpo_megatron.config.run import RunConfig

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""`module:function`."""
_LONGEST_NAME = 4096
"""Characters of a path; what is longer is a text."""


def own_files(config: RunConfig) -> list[Path]:
    """Return modules below the current directory whose functions are named (rewards, environments,
    agents, parts of an objective) and those there that they import, files among arguments and words
    of commands, and folders of images, in the order of their names. Installed packages are left
    out: the machine that submits need not have them. So is the library, also in its own checkout:
    it is not the user's."""
    found: set[Path] = set()
    for text in _texts(config.model_dump(mode="json", include={"domains", "objective"})):
        reference = _REFERENCE.fullmatch(text)
        if reference is not None:
            _add_module(reference[1], found)
        elif _is_file(text):
            found.add(assets.input_path(Path(text)))
    for domain in config.domains:
        if domain.image_folder is not None:
            found.add(domain.image_folder)
    return sorted(found)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _add_module(name: str, found: set[Path]) -> None:
    """Add the files of a module to those found, and of all modules that they import."""
    coming = [name]
    while coming:
        for file in _module_files(coming.pop()):
            if file in found:
                continue
            found.add(file)
            if file.is_file():  # no link to nowhere
                about = file.stat()
                coming += _imported(file, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4096)
def _imported(file: Path, size: int, mtime_ns: int) -> tuple[str, ...]:
    """Return names of modules, and of what is taken from modules and may be one, that a file
    imports anywhere; none of one that is no Python. Names within its own package are left out: all
    files of a package count.

    size, mtime_ns: Of the file, which is read once for all stages that name it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # who imports it is told
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(dict.fromkeys(names))


def _module_files(name: str) -> list[Path]:
    """Return the file of a module below the current directory, or every Python file of a package
    there; none of a module that lies elsewhere, or is the library's. name: also with the name of
    something in the module."""
    package, *inner = name.split(".")
    if package == grpo_megatron.__name__:
        return []
    folder = Path(package)
    if (folder / "__init__.py").is_file() or (inner and _is_package_of(folder, inner[0])):
        return list(folder.rglob("*.py"))
    file = folder.with_suffix(".py")
    if file.is_file():
        return [file]
    return []


def _is_package_of(folder: Path, module: str) -> bool:
    """Whether a folder without `__init__.py` has a module: else it is data that is called as an
    installed package."""
    return (folder / module).is_dir() or (folder / f"{module}.py").is_file()


def _is_file(text: str) -> bool:
    """Whether a text names a file, of the user or of those that are shipped."""
    if not text or len(text) > _LONGEST_NAME or "\0" in text:
        return False
    try:
        return assets.input_path(Path(text)).is_file()
    except (OSError, RuntimeError):  # a part is longer than a file's name; ~ of no user
        return False
