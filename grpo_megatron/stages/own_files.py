"""Files of the user's own that a recipe names beside its models and data sets: what stages are made
from, too."""

import re
from collections.abc import Iterator
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
    agents, parts of an objective), files among arguments and words of commands, and folders of
    images, in the order of their names. Installed packages are left out: the machine that submits
    need not have them. So is the library, also in its own checkout: it is not the user's."""
    found = set()
    for text in _texts(config.model_dump(mode="json", include={"domains", "objective"})):
        reference = _REFERENCE.fullmatch(text)
        if reference is not None:
            found.update(_module_files(reference[1]))
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


def _module_files(name: str) -> list[Path]:
    """Return the file of a module below the current directory, or every Python file of a package
    there; none of a module that lies elsewhere, or is the library's."""
    package, *inner = name.split(".")
    if package == grpo_megatron.__name__:
        return []
    folder = Path(package)
    if (folder / "__init__.py").is_file() or (inner and folder.is_dir()):
        return list(folder.rglob("*.py"))
    file = folder.with_suffix(".py")
    if file.is_file():
        return [file]
    return []


def _is_file(text: str) -> bool:
    """Whether a text names a file, of the user or of those that are shipped."""
    if not text or len(text) > _LONGEST_NAME or "\0" in text:
        return False
    try:
        return assets.input_path(Path(text)).is_file()
    except (OSError, RuntimeError):  # a part is longer than a file's name; ~ of no user
        return False
