"""Model families: `families/<model_type>.toml` is all that is known of one (see `parts/base.toml`).

The tables drive import, export, publishing and digests (`weights.rules`), the reading of
config.json (`plan.hf_config`) and Megatron's configuration (`trainer.model_config`).
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.toml_file import read_toml
from grpo_megatron.errors import ConfigError

_FOLDER = Path(__file__).with_name("families")


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inventory of config.json: every field that the family may have."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Must be written, be it as null: transformers takes something else where it is missing."""
    null: tuple[str, ...] = ()
    """May be null only."""
    rope: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    default: dict[str, Any] = {}
    fixed: dict[str, list[Any]] = {}
    """Accepted values; `a.b` is field b of table a."""

    @property
    def known(self) -> set[str]:
        parts = (self.required, self.optional, self.present, self.null, self.rope, self.ignored,
                 self.default, self.fixed)
        return {name.split(".")[0] for part in parts for name in part}


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model family."""

    name: str
    model: dict[str, str]
    layer: dict[str, str | list[str]]
    spellings: dict[str, str]
    aliases: dict[str, list[str]]
    fields: Fields
    rope: dict[str, dict[str, Any]]
    megatron: dict[str, Any]
    lacks: str = ""  # what Megatron-Core has no layer for; such a family is refused with it


def family_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def family_of(model_type: str | None) -> Family:
    """The family of a `model_type`; ConfigError where there is none, or one that Megatron-Core
    cannot compute."""
    known = family_names()
    if model_type not in known:
        near = nearest(str(model_type), known) or known
        raise ConfigError(f"model_type {model_type!r} is not supported", where="config.json",
                          remedy=f"known families: {', '.join(near)}")
    family = msgspec.convert({"name": model_type, **_tables(model_type)}, Family)
    if family.lacks:
        raise ConfigError(f"model_type {model_type!r} is not supported: {family.lacks}",
                          where="config.json")
    return family


def base_tables() -> dict[str, Any]:
    """The tables that every family starts from."""
    return _tables("base")


@cache
def _tables(name: str) -> dict[str, Any]:
    """A file's tables over those of the parts that it extends, later parts over earlier ones."""
    file = _FOLDER / f"{name}.toml"
    own = dict(read_toml(file if file.exists() else _FOLDER / "parts" / f"{name}.toml").values)
    merged: dict[str, Any] = {}
    for part in own.pop("extends", ()):
        merged = _merge(merged, _tables(part))
    return _merge(merged, own)


def _merge(below: Any, above: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merge(below[key], value, (*path, key)) if key in below else value
                        for key, value in above.items()}
    if path[:1] == ("fields",) and len(path) == 2:  # the lists of names
        return [*below, *above]
    return above
