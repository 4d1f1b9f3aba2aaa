"""A TOML file with line numbers, and the chain of recipes that `extends` makes."""

import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.keys import KeyPath, dotted, nearest_above, nodes
from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.errors import ConfigError, raised_as

_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)")


@dataclass(frozen=True)
class TomlFile:
    """A parsed file that still knows its lines."""

    path: Path
    display: str  # the path as messages show it
    values: dict[str, Any]
    text: str

    @cached_property
    def lines(self) -> Mapping[KeyPath, int]:
        """The line, from 1, of every key."""
        return key_lines(self.text)

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key, or of the nearest table around it."""
        line = nearest_above(path, self.lines)
        if line is None:
            return self.display
        return f"{self.display}:{line}"


def read_toml(path: Path) -> TomlFile:
    """Parse one file; ConfigError, with file and line, where it is unreadable or not TOML."""
    display = assets.display(path)
    with (
        raised_as(
            ConfigError,
            "cannot read the file",
            OSError,
            where=display,
            remedy="check the path and its permissions",
        ),
        raised_as(
            ConfigError,
            "not UTF-8 text",
            UnicodeDecodeError,
            where=display,
            remedy="save the file as UTF-8",
        ),
    ):
        text = path.read_text(encoding="utf-8-sig")
    try:
        return TomlFile(path, display, tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        what = _AT_LINE.sub("", str(error))
        line = text.count("\n") + 1
        if at is not None:
            line = int(at[1])
        raise ConfigError(
            f"{what}: not valid TOML",
            where=f"{display}:{line}",
            remedy="correct the syntax at this line",
        ) from None


@lru_cache(maxsize=256)  # recipes share what they extend, and are read more than once
def key_lines(text: str) -> Mapping[KeyPath, int]:
    """The line, from 1, of every key, table and element of an array of tables of a valid document;
    `tomllib` does not keep them. A statement ends with the first line at which it parses."""
    lines: dict[KeyPath, int] = {}
    sizes: Counter[KeyPath] = Counter()  # elements seen of each `[[array]]`
    table: KeyPath = ()
    statement = ""
    first = 1
    for number, line in enumerate(text.split("\n"), start=1):
        statement += line + "\n"
        try:
            tree = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            table = _header(tree, sizes)
            tree = {}
            for length in range(1, len(table) + 1):
                lines.setdefault(table[:length], first)
        end = 0
        for path, _ in nodes(tree):
            if not path or isinstance(path[-1], int):
                continue  # no key of its own
            name = re.escape(dotted(path[-1:]))
            place = re.compile(rf"(?<![\w-]){name}[\"']?\s*=").search(statement, end)
            if place is not None:
                end = place.end()
            lines.setdefault((*table, *path), first + statement.count("\n", 0, end))
        statement = ""
        first = number + 1
    return MappingProxyType(lines)


def _header(tree: Any, sizes: Counter[KeyPath]) -> KeyPath:
    """Return the path of `[table]` or `[[array]]`; below an array, that of its newest element."""
    path: KeyPath = ()
    while isinstance(tree, dict) and tree:
        [(name, tree)] = tree.items()
        path = (*path, name)
        sizes[path] += isinstance(tree, list)  # what `[[array]]` parses to
        if sizes[path]:
            path = (*path, sizes[path] - 1)
    return path


def find_recipe(recipe: str | Path, shipped: Path | None = None) -> Path:
    """Return a path, or a name below `shipped` (with or without `.toml`); ConfigError lists near
    ones."""
    shipped = shipped or assets.root() / "recipes"
    for candidate in (Path(recipe), shipped / recipe, shipped / f"{recipe}.toml"):
        if candidate.is_file():
            return candidate
    names = assets.names(shipped)
    by_stem = {Path(name).name: name for name in names}
    wanted = Path(recipe).name.removesuffix(".toml")
    listed = [by_stem[stem] for stem in nearest(wanted, by_stem)] or names
    raise ConfigError(
        f"no {shipped.name[:-1]} at {str(recipe)!r}",
        where=str(Path.cwd()),
        remedy=("give a .toml file or the name of a shipped one: " + ", ".join(listed[:5])),
    )


def read_recipe_chain(path: Path) -> list[TomlFile]:
    """Return the recipe and all that it extends, base first, without their `extends` keys. Raises
    ConfigError for a missing or unreadable file, or a recipe that extends itself."""
    chain: list[TomlFile] = []
    next_path: Path | None = path
    while next_path is not None:
        file = read_toml(next_path)
        if any(file.path.resolve() == other.path.resolve() for other in chain):
            raise ConfigError(
                f"{file.display} extends itself",
                where=chain[-1].where(("extends",)),
                remedy="break the circle of `extends`",
            )
        _refuse_graph(file)
        chain.append(file)
        next_path = _base_of(file)
    return chain[::-1]


def _refuse_graph(file: TomlFile) -> None:
    """Raise ConfigError for a graph of stages, all of whose keys a recipe would not know."""
    if isinstance(file.values.get("stages"), dict):
        path = shlex.quote(str(file.path))
        raise ConfigError(
            "this is a graph of stages, and no recipe",
            where=file.display,
            remedy=f"grpo-megatron stages run {path}, or grpo-megatron rehearse {path}",
        )


def _base_of(file: TomlFile) -> Path | None:
    """Return the recipe that one extends: beside it, or a shipped one by its name."""
    if "extends" not in file.values:
        return None
    base = file.values.pop("extends")
    where = file.where(("extends",))
    if not isinstance(base, str):
        raise ConfigError(
            f"extends must be the path or name of one recipe, not {base!r}",
            where=where,
            remedy='write extends = "other.toml"',
        )
    path = file.path.parent / base
    shipped = assets.root() / "recipes" / f"{base}.toml"
    if not path.is_file() and shipped.is_file():
        return shipped
    if not path.is_file():
        folder = file.path.parent
        if path.parent.is_dir():
            folder = path.parent
        recipes = sorted(recipe.name for recipe in folder.glob("*.toml"))
        names = assets.names(assets.root() / "recipes")
        remedy = "the path is relative to the recipe that extends it; "
        remedy += did_you_mean(path.name, recipes)
        near = nearest(base.removesuffix(".toml"), names)
        if near:
            remedy += f"; shipped recipes: {', '.join(near)}"
        raise ConfigError(
            f"extends names a file that does not exist: {base}", where=where, remedy=remedy
        )
    return path
