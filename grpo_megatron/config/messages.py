"""Pydantic's errors in the words of a recipe: key, value, place, nearest, fix."""

import math
import tomllib
from pathlib import Path
from typing import Any

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath, dotted
from grpo_megatron.config.problems import Problem, as_toml
from grpo_megatron.config.provenance import Layers
from grpo_megatron.config.suggest import nearest

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def problem_of(error: dict[str, Any], layers: Layers) -> Problem:
    """Turn one entry of `ValidationError.errors()` into a problem."""
    path: KeyPath = error["loc"]
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, error["input"], layers)
    if error["type"] == "missing":
        return _missing_key(path, layers)
    return _wrong_value(path, error, layers)


def _unknown_key(path: KeyPath, value: Any, layers: Layers) -> Problem:
    near = schema.nearest_keys(path)
    full, suffix = path, ""
    while isinstance(value, dict) and len(value) == 1:  # `trianer.num_ranks=2`: show it all
        key, value = next(iter(value.items()))
        full, suffix = (*full, key), f"{suffix}.{key}"
    near = [key + suffix for key in near]
    parent = dotted(path[:-1])
    fix = f"write {near[0]}" if near else (
        f"valid keys of {parent or 'the top level'}: " + ", ".join(schema.keys_of(path[:-1])))
    return Problem(dotted(full), "unknown key", str(layers.origin(full)), value=as_toml(value),
                   nearest=tuple(near), remedy=fix)


def _missing_key(path: KeyPath, layers: Layers) -> Problem:
    where = str(layers.origin(path[:-1])) if len(path) > 1 else ""
    return Problem(dotted(path), "is required", where if where != "default" else "",
                   meaning=schema.meaning_of(path),
                   remedy=f"add {path[-1]} to the recipe, or pass {dotted(path)}=…")


def _wrong_value(path: KeyPath, error: dict[str, Any], layers: Layers) -> Problem:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    choices = list(map(str, schema.choices_at(path)))
    words = {**context, "choices": ", ".join(choices)}
    message = _WORDS[kind].format(**words) if kind in _WORDS else error["msg"]
    bound = context.get("ge", context.get("le"))
    near = nearest(str(value), choices, count=1) if choices else (
        _meant(value, kind) if bound is None else [f"{bound:g}"])
    key = dotted(path)
    return Problem(key, message, str(layers.origin(path)), value=as_toml(value),
                   nearest=tuple(near), meaning=schema.meaning_of(path),
                   remedy=f"set {key}={near[0]}" if near else "")


def _meant(value: Any, kind: str) -> list[str]:
    """`"2"` for a number, `True` for a bool, 2.0 for a whole number: what was surely meant."""
    text = str(value).strip()
    if kind == "bool_type":
        return nearest(text, ("true", "false"), count=1)
    if kind == "string_type" and not isinstance(value, dict | list):
        return [f'"{text}"']
    if kind not in ("int_type", "int_from_float", "float_type") or isinstance(value, bool):
        return []
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return []
    return [f"{number:{'g' if kind == 'float_type' else '.0f'}}"] if math.isfinite(number) else []
