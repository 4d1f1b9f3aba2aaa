"""Questions about the schema of `RunConfig`: which keys exist, of which type, what they mean."""

import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_megatron.config.keys import KeyPath, dotted
from grpo_megatron.config.objective import OrFunction
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest, plain

_HABITS: dict[str, str] = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "sp": "sequence_parallel",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "world_size": "num_ranks",
    "num_gpus": "num_ranks",
    "learning_rate": "lr",
    "max_steps": "num_steps",
    "steps": "num_steps",
    "group_size": "num_samples_per_prompt",
    "num_generations": "num_samples_per_prompt",
    "batch_size": "num_prompts",
    "ppo_epochs": "epochs",
    "num_iterations": "epochs",
    "top_entropy_quantile": "top_entropy_share",
    "m2_threshold": "m2po_limit",
    "prox_logp_method": "proximal",
    "fipo_decay_rate": "future_kl_half_life",
    "drpo_epsilon": "drpo_delta",
    "max_tokens": "max_new_tokens",
    "grad_clip": "clip_grad",
    "step_s": "episode_s",  # of an agent, which has no steps
}
"""What people type from habit, where the likeness to the key cannot be seen."""


@cache
def all_fields() -> dict[KeyPath, FieldInfo]:
    """Return every key with fixed meaning; list elements are `*`."""
    return dict(_walk(RunConfig, ()))


def _walk(table: type[BaseModel], prefix: KeyPath) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, info in table.model_fields.items():
        path = (*prefix, name)
        annotation = _without_none(info.annotation)
        yield path, info
        if get_origin(annotation) is tuple:
            path = (*path, "*")
            annotation = _without_none(get_args(annotation)[0])
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, path)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not types.NoneType]
        if len(options) == 1:
            annotation = options[0]
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def _general(path: Sequence[str | int]) -> KeyPath:
    """`("domains", 0, "weight")` -> `("domains", "*", "weight")`."""
    parts: list[str | int] = []
    for part in path:
        if str(part).isdigit():
            part = "*"
        parts.append(part)
    return tuple(parts)


def type_of(path: KeyPath) -> Any:
    """Type at `path` without `| None`; `None` where the schema knows no such key."""
    info = all_fields().get(_general(path))
    return info and _without_none(info.annotation)


def meaning_of(path: KeyPath) -> str:
    """Return the description of the key at `path`; empty where it has none."""
    info = all_fields().get(_general(path))
    if info is None:
        return ""
    return info.description or ""


def keys_of(path: Sequence[str | int]) -> list[str]:
    """Return keys of the table at `path`; empty where it is no table with fixed keys."""
    table = _general(path)
    return [str(key[-1]) for key in all_fields() if key[:-1] == table]


def takes_text(path: KeyPath) -> bool:
    """Whether the value at `path` is text: then `name=007` is text as well."""
    choices = choices_at(path)
    if not choices:
        return type_of(path) in (str, Path)
    return all(isinstance(choice, str) for choice in choices)


def lists_texts(path: KeyPath) -> bool:
    """Whether the value at `path` is a list of any texts."""
    kind = type_of(path)
    return get_origin(kind) is tuple and get_args(kind)[0] in (str, Path)


def choices_at(path: KeyPath) -> tuple[Any, ...]:
    """Return the fixed set of values at `path`; empty if open."""
    kind = type_of(path)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return ()


def takes_function(path: KeyPath) -> bool:
    """Whether the value at `path` may also be `module:function`."""
    info = all_fields().get(_general(path))
    return info is not None and any(isinstance(part, OrFunction) for part in info.metadata)


@cache
def _paths_by_name() -> dict[str, tuple[str, ...]]:
    """Return the last part of every key, and the dotted keys that end with it."""
    found: dict[str, list[str]] = {}
    for path in all_fields():
        found.setdefault(str(path[-1]), []).append(dotted(path))
    return {name: tuple(paths) for name, paths in found.items()}


def nearest_keys(path: KeyPath, *, count: int = 3) -> list[str]:
    """Return what the unknown key at `path` may stand for: likely typos, then the name in other
    tables."""
    *table, key = map(str, path)
    here = keys_of(table)
    anywhere = _paths_by_name()
    habit: str | None = _HABITS.get(plain(key))

    likely: list[str] = []
    if habit is not None and habit in here:
        likely.append(habit)
    likely += nearest(key, here, cutoff=0.8)
    same = list(anywhere.get(plain(key), ()))
    if habit is not None:
        same += anywhere.get(habit, ())
    # `domains.0.objective.preset`: rather that of another objective than that of the model
    tail = dotted((*table[-1:], plain(key)))
    same.sort(
        key=lambda full: (
            dotted(tuple(table)) not in full,
            not f".{full}".endswith(f".{tail}"),
            "*" in full,
        )
    )
    found = [dotted((*table, name)) for name in likely]
    found += same
    found += [dotted((*table, name)) for name in nearest(key, here)]
    if not found:
        for name in nearest(key, anywhere, cutoff=0.75):
            found += anywhere[name]
    if table[-1:] == ["agent"]:  # a domain has an agent or an environment
        found = [name for name in found if ".environment." not in name]
    index = "0"  # of the list element that `*` stands for
    for part in table:
        if part.isdigit():
            index = part
            break
    distinct = dict.fromkeys(name.replace("*", index) for name in found)
    return list(distinct)[:count]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for editors."""
    schema = RunConfig.model_json_schema()
    schema["title"] = "grpo-megatron recipe"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Recipe to start from: a path relative to this file, or a shipped name.",
    }
    return schema
