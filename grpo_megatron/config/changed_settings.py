"""In which settings two `config.json` differ, and which of these differences the library made."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.keys import dotted, leaves
from grpo_megatron.config.loader import ResolvedConfig, to_json
from grpo_megatron.errors import ConfigError

_OF_THE_LIBRARY = ("default", "preset")
"""Kinds of origin of what no recipe and no flag sets: another release may have another value."""


@dataclass(frozen=True, slots=True)
class ChangedSettings:
    """Dotted keys of settings that differ.

    Attributes:
        chosen: A recipe, a flag or a model's preset sets them, on one side at least.
        defaults: A default or a preset of an objective sets them on both sides."""

    chosen: tuple[str, ...]
    defaults: tuple[str, ...]


def values_of(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what `config.json` holds of a configuration."""
    values: dict[str, Any] = json.loads(to_json(resolved))
    return values


def read_values(file: Path) -> dict[str, Any]:
    """Return what a `config.json` holds, which may be of another release: one that knew settings
    that are gone. ConfigError where it is damaged."""
    values: dict[str, Any] = {}
    try:
        values = json.loads(file.read_bytes())
        is_whole = all(isinstance(values[key], dict) for key in ("config", "provenance"))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ConfigError("the run's configuration is damaged", where=assets.display(file))
    return values


def changed_settings(
    then: Mapping[str, Any], now: Mapping[str, Any], *, left_out: Collection[str]
) -> ChangedSettings:
    """Compare what two `config.json` hold, of the same or of different releases. A setting that
    one of them does not know counts where somebody chose it.

    left_out: Tables and settings, by the first part of their keys, that do not count."""
    values_then = _values_by_key(then, left_out)
    values_now = _values_by_key(now, left_out)
    chosen = []
    defaults = []
    for key in {**values_then, **values_now}:
        if key in values_then and key in values_now:
            if values_then[key] == values_now[key]:
                continue
            by_library = _is_of_library(then, key) and _is_of_library(now, key)
        elif key in values_then:
            by_library = _is_of_library(then, key) and not _has_leaf_above(key, values_now)
        else:
            by_library = _is_of_library(now, key) and not _has_leaf_above(key, values_then)
        if by_library:
            defaults.append(key)
        else:
            chosen.append(key)
    return ChangedSettings(tuple(chosen), tuple(defaults))


def _values_by_key(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    counted = {key: value for key, value in values["config"].items() if key not in left_out}
    return {dotted(path): value for path, value in leaves(counted)}


def _is_of_library(values: Mapping[str, Any], key: str) -> bool:
    origin = values["provenance"].get(key)
    if origin is None:
        return True  # as in `ResolvedConfig`: what nobody sets is a default
    return isinstance(origin, dict) and origin.get("kind") in _OF_THE_LIBRARY


def _has_leaf_above(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a table around a key is one value there: a table that is null or empty is not one
    that another release does not know."""
    above = key
    while "." in above:
        above = above.rpartition(".")[0]
        if above in values:
            return True
    return False
