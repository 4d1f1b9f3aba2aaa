"""Pydantic's errors in the words of a recipe: key, value, place, nearest, fix."""

from __future__ import annotations

from typing import Any

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath, dotted
from grpo_megatron.config.problems import Problem, as_toml
from grpo_megatron.config.provenance import Layers
from grpo_megatron.config.suggest import nearest, nearest_keys

_MUST_BE = {
    "int_type": "must be a whole number", "int_from_float": "must be a whole number",
    "float_type": "must be a number", "bool_type": "must be true or false",
    "string_type": "must be text", "path_type": "must be a path",
    "tuple_type": "must be a list", "dict_type": "must be a table",
    "model_type": "must be a table", "model_attributes_type": "must be a table",
    "finite_number": "must be a finite number",
}
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
           "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}


def problem_of(error: dict[str, Any], layers: Layers) -> Problem:
    """Turn one entry of `ValidationError.errors()` into a problem."""
    path: KeyPath = error["loc"]
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, error["input"], layers)
    if error["type"] == "missing":
        return _missing_key(path, layers)
    return _wrong_value(path, error, layers)


def _unknown_key(path: KeyPath, value: Any, layers: Layers) -> Problem:
    near = nearest_keys(path)
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
    near: tuple[str, ...] = ()
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        message = f"must be {words} {context[name]:g}"
        near = (f"{context[name]:g}",) if name in ("ge", "le") else ()
    elif kind == "literal_error":
        choices = schema.choices_at(path)
        message = "must be one of: " + ", ".join(choices)
        near = tuple(nearest(str(value), choices, count=1))
    elif kind == "too_short":
        message = f"needs at least {context['min_length']} element(s)"
    elif kind == "string_pattern_mismatch":
        message = f"must match {context['pattern']}"
    else:
        message = _MUST_BE.get(kind, error["msg"])
        near = _convertible(value, kind)
    key = dotted(path)
    return Problem(key, message, str(layers.origin(path)), value=as_toml(value), nearest=near,
                   meaning=schema.meaning_of(path), remedy=f"set {key}={near[0]}" if near else "")


def _convertible(value: Any, kind: str) -> tuple[str, ...]:
    """`"2"` for a number, `True` for a bool, 2.0 for a whole number: what was surely meant."""
    text = str(value).strip()
    if kind == "bool_type":
        return tuple(nearest(text, ("true", "false"), count=1))
    if kind in ("int_type", "int_from_float", "float_type"):
        try:
            number = float(text.replace(",", ""))
        except ValueError:
            return ()
        if isinstance(value, bool) or number != number or abs(number) == float("inf"):
            return ()
        return (f"{number:g}" if kind == "float_type" else str(round(number)),)
    if kind == "string_type" and not isinstance(value, dict | list):
        return (f'"{text}"',)
    return ()
