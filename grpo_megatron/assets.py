"""Where the shipped data lives: model presets in `models/`, `recipes/` by topic, and batch script
templates and site settings in `slurm/`. A wheel carries them under `grpo_megatron/_assets/`; a
checkout (also an editable install) has them beside the package."""

import glob
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from grpo_megatron.errors import SetupError

FOLDERS = ("models", "recipes", "slurm")
_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """Return the directory that holds `models/`, `recipes/` and `slurm/`."""
    return _root_of(_PACKAGE)


@cache
def _root_of(package: Path) -> Path:
    for candidate in (package / "_assets", package.parent):
        if all((candidate / folder).is_dir() for folder in FOLDERS):
            return candidate
    raise SetupError(
        "the installation carries no models/, recipes/ and slurm/",
        where=str(package),
        remedy="reinstall grpo-megatron, or run from a complete checkout",
    )


def input_path(path: Path) -> Path:
    """Return where an input is, absolute: relative to the current directory. What is not there and
    begins with `recipes/data` is the shipped file of that name, so that recipes with data run
    anywhere."""
    path = path.expanduser()
    is_shipped = path.parts[:2] == ("recipes", "data") and not path.exists()
    if is_shipped and (root() / path).exists():
        return root() / path
    return path.absolute()


def tables(module: str, name: str) -> dict[str, Any]:
    """Return the TOML file `name` beside a `module` of the package."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def names(folder: Path) -> list[str]:
    """Return names of the TOML files below `folder` but graphs: relative, with `/`, without
    `.toml`."""
    found = []
    for path in glob.glob("**/*.toml", root_dir=folder, recursive=True):
        if "graphs" not in path.split("/"):
            found.append(path.removesuffix(".toml"))
    return sorted(found)


def display(path: Path) -> str:
    """`path` as short as it stays clear: below the current directory, below the assets, or full."""
    path = Path(os.path.realpath(path))  # `resolve` raises where links go in a circle
    for base in (Path.cwd(), root()):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return str(path)
