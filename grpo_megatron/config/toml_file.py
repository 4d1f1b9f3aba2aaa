"""A TOML file with line numbers, and the chain of recipes that `extends` makes."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.keys import KeyPath
from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.config.toml_lines import key_lines
from grpo_megatron.errors import ConfigError

_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A parsed file."""

    path: Path
    display: str
    """The path as messages show it."""
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key, or of the nearest table around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.display}:{self.lines[path[:length]]}"
        return self.display


def read_toml(path: Path) -> TomlFile:
    """Parse one file.

    Raises:
        ConfigError: Unreadable, not UTF-8 or not TOML; with file and line.
    """
    display = assets.display(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        raise ConfigError(_AT_LINE.sub("", str(error)) + ": not valid TOML",
                          where=f"{display}:{at[1] if at else text.count(chr(10)) + 1}",
                          remedy="correct the syntax at this line") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=display,
                          remedy="save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=display,
                          remedy="check the path and its permissions") from None
    return TomlFile(path, display, values, key_lines(text))


def find_recipe(recipe: str | Path) -> Path:
    """A path, or a name below `recipes/` with or without `.toml`.

    Raises:
        ConfigError: Neither exists; lists near matches.
    """
    shipped = assets.recipes()
    for candidate in (Path(recipe), shipped / recipe, shipped / f"{recipe}.toml"):
        if candidate.is_file():
            return candidate
    names = assets.names(shipped)
    by_stem = {Path(name).name: name for name in names}
    wanted = Path(recipe).name.removesuffix(".toml")
    listed = [by_stem[stem] for stem in nearest(wanted, by_stem)] or names
    raise ConfigError(f"no recipe at {str(recipe)!r}", where=str(Path.cwd()),
                      remedy="give a path to a .toml file or a shipped recipe: "
                      + ", ".join(listed[:5]))


def read_recipe_chain(path: Path) -> list[TomlFile]:
    """The recipe and all that it extends, base first, without their `extends` keys.

    Raises:
        ConfigError: A missing or unreadable file, or a recipe that extends itself.
    """
    chain: list[TomlFile] = []
    next_path: Path | None = path
    while next_path is not None:
        file = read_toml(next_path)
        if any(file.path.resolve() == other.path.resolve() for other in chain):
            raise ConfigError(f"{file.display} extends itself", where=chain[-1].where(("extends",)),
                              remedy="break the circle of `extends`")
        chain.append(file)
        next_path = _base_of(file)
    return chain[::-1]


def _base_of(file: TomlFile) -> Path | None:
    if "extends" not in file.values:
        return None
    base, where = file.values.pop("extends"), file.where(("extends",))
    if not isinstance(base, str):
        raise ConfigError(f"extends must be the path of one recipe, not {base!r}", where=where,
                          remedy='write extends = "other.toml"')
    path = file.path.parent / base
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else file.path.parent
        raise ConfigError(f"extends names a file that does not exist: {base}", where=where,
                          remedy="the path is relative to the recipe that extends it; " +
                          did_you_mean(path.name, sorted(o.name for o in folder.glob("*.toml"))))
    return path
