"""Questions about the schema of `RunConfig`: which keys exist, of which type, what they mean."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_megatron.config.keys import KeyPath, dotted
from grpo_megatron.config.run import RunConfig


def _bare(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not types.NoneType]
        return options[0] if len(options) == 1 else annotation
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def annotation_at(path: KeyPath) -> Any:
    """Type at `path` without `| None`; `None` where the schema knows no such key."""
    annotation: Any = RunConfig
    for part in path:
        if _is_model(annotation) and part in annotation.model_fields:
            annotation = _bare(annotation.model_fields[part].annotation)
        elif get_origin(annotation) is tuple and str(part).isdigit():
            annotation = _bare(get_args(annotation)[0])
        else:
            return None
    return annotation


def field_at(path: KeyPath) -> FieldInfo | None:
    """The pydantic field at `path`, if it is one."""
    table = annotation_at(path[:-1]) if path else None
    return table.model_fields.get(path[-1]) if _is_model(table) else None


def meaning_of(path: KeyPath) -> str:
    """The help text of the key at `path`, or nothing."""
    info = field_at(path)
    return (info.description or "") if info else ""


def keys_of(path: KeyPath) -> list[str]:
    """Keys of the table at `path`; empty where it is no table with fixed keys."""
    table = annotation_at(path)
    return list(table.model_fields) if _is_model(table) else []


def is_list(path: KeyPath) -> bool:
    """Whether the schema has a list at `path`."""
    return get_origin(annotation_at(path)) is tuple


def takes_text(path: KeyPath) -> bool:
    """Whether the value at `path` is text: then `name=007` is text as well."""
    annotation = annotation_at(path)
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation in (str, Path)


def choices_at(path: KeyPath) -> tuple[str, ...]:
    """The fixed set of values at `path`, as written in TOML without quotes; empty if open."""
    annotation = annotation_at(path)
    if annotation is bool:
        return ("true", "false")
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


@cache
def all_keys() -> tuple[tuple[str, str], ...]:
    """`(last part, dotted key)` of every key; list elements show as `*`."""
    return tuple(_walk(RunConfig, ()))


def _walk(table: type[BaseModel], prefix: KeyPath) -> Iterator[tuple[str, str]]:
    for name, info in table.model_fields.items():
        path, annotation = (*prefix, name), _bare(info.annotation)
        yield name, dotted(path)
        if get_origin(annotation) is tuple:
            path, annotation = (*path, "*"), _bare(get_args(annotation)[0])
        if _is_model(annotation):
            yield from _walk(annotation, path)


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    schema = RunConfig.model_json_schema()
    schema["title"] = "grpo-megatron recipe"
    schema["properties"]["extends"] = {
        "type": "string", "description": "Recipe to start from, relative to this file."}
    return schema
