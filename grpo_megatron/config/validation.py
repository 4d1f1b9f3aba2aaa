"""From a merged tree to a `RunConfig`, or to the list of everything that is wrong with it: key,
value, place, nearest, fix, in the words of a recipe."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from grpo_megatron.config import schema
from grpo_megatron.config.imports import with_colon
from grpo_megatron.config.keys import KeyPath, dotted, value_at
from grpo_megatron.config.overlay import DEFAULT, ConfigOverlay, Origin
from grpo_megatron.config.problems import ConfigProblem, InvalidConfigError, as_toml
from grpo_megatron.config.rules.check import check_rules
from grpo_megatron.config.rules.rule_set import Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest

_WORDS: dict[str, str] = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt:g}",
    "literal_error": "must be one of: {choices}",
    "too_short": "needs at least {min_length} element(s)",
    "string_pattern_mismatch": "must match {pattern}",
}
"""Pydantic's kinds of error in the words of a recipe; fields are those of the error's context."""
Check = Callable[[RunConfig], list[Violation]]  # of a whole, well-typed configuration


def valid(
    overlay: ConfigOverlay, problems: Sequence[ConfigProblem], checks: Sequence[Check], source: str
) -> RunConfig:
    """Return the configuration of `overlay`; InvalidConfigError with the `problems` so far and
    everything else that is wrong.

    Rules run even when some keys are wrong, on what is left without these keys; what a rule says
    about a wrong key is dropped then, because its intended value is not known."""
    config, errors = _parse(overlay.tree)
    found = list(problems)
    for error in errors:
        if not _is_told(error, problems):
            found.append(_problem_of(error, overlay))
    if errors:
        config, _ = _parse(_without(overlay.tree, [error["loc"] for error in errors]))
    if config is not None:
        unsure = _unsure_keys(errors)
        for check in (check_rules, *checks):
            for violation in check(config):
                if not _is_about(violation, unsure):
                    found.append(_problem_of_violation(violation, config, overlay))
    if found or config is None:
        count = f"{len(found)} problem"
        if len(found) > 1:
            count += "s"
        raise InvalidConfigError(f"{count} in {source}; nothing was started", problems=found)
    return config


def _is_told(error: Mapping[str, Any], problems: Sequence[ConfigProblem]) -> bool:
    """Whether a list is missing or empty of which a problem says that it lacks an element."""
    if error["type"] not in ("missing", "too_short"):
        return False
    place = dotted(error["loc"])
    return any(problem.key.startswith(f"{place}.") for problem in problems)


def _unsure_keys(errors: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return keys whose intended value is not known: wrong ones, and what unknown ones may mean."""
    keys = set()
    for error in errors:
        keys.add(dotted(error["loc"]))
        if error["type"] == "extra_forbidden":
            keys |= set(schema.nearest_keys(error["loc"]))
    return keys


def _is_about(violation: Violation, keys: Collection[str]) -> bool:
    """Whether a violation is of one of `keys`, of something below, or related to it."""
    for told in (violation.key, *violation.related):
        if any(f"{told}.".startswith(f"{key}.") for key in keys):
            return True
    return False


def _parse(tree: dict[str, Any]) -> tuple[RunConfig | None, list[ErrorDetails]]:
    """Strict JSON mode: no `"2"` for 2, but lists for tuples and text for paths."""
    try:
        return RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    return None, [error for error in errors if not _is_echo(error, errors)]


def _is_echo(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Whether a list is too short only because elements of it are wrong and were left out."""
    if error["type"] != "too_short":
        return False
    place = error["loc"]
    others = [other["loc"] for other in errors if other is not error]
    return any(other[: len(place)] == place for other in others)


def _without(tree: dict[str, Any], paths: Sequence[KeyPath]) -> dict[str, Any]:
    """Return a copy without the nodes at `paths`; list elements stay, so that indices keep
    meaning."""
    tree = copy.deepcopy(tree)
    for path in paths:
        node: Any = tree
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for part in path[:-1]:
                node = node[part]
            if isinstance(node, dict):
                node.pop(path[-1], None)
    return tree


def _problem_of(error: Mapping[str, Any], overlay: ConfigOverlay) -> ConfigProblem:
    known = {"extra_forbidden": _unknown_key, "missing": _missing_key}
    return known.get(error["type"], _wrong_value)(error["loc"], error, overlay)


def _unknown_key(path: KeyPath, error: Mapping[str, Any], overlay: ConfigOverlay) -> ConfigProblem:
    near = schema.nearest_keys(path)
    value = error["input"]
    full = path
    suffix = ""
    while isinstance(value, dict) and len(value) == 1:  # `trianer.num_ranks=2`: show it all
        key, value = next(iter(value.items()))
        full = (*full, key)
        suffix = f"{suffix}.{key}"
    if suffix:
        near = [key + suffix for key in near if _may_have(key, suffix)]
    if near:
        fix = f"write {near[0]}"
    else:
        parent = dotted(path[:-1]) or "the top level"
        fix = f"valid keys of {parent}: " + ", ".join(schema.keys_of(path[:-1]))
    return ConfigProblem(
        dotted(full),
        "unknown key",
        str(overlay.origin(full)),
        value=as_toml(value),
        nearest=tuple(near),
        remedy=fix,
    )


def _may_have(table: str, suffix: str) -> bool:
    """Whether there may be a key `suffix`, which begins with a dot, below `table`."""
    path = tuple(table.split("."))
    keys = schema.keys_of(path)
    if keys:
        return suffix.split(".")[1] in keys
    return get_origin(schema.type_of(path)) in (dict, Mapping)  # with keys of the user's own


def _missing_key(path: KeyPath, error: Mapping[str, Any], overlay: ConfigOverlay) -> ConfigProblem:
    where = ""
    if len(path) > 1:
        where = str(overlay.origin(path[:-1]))
    if where == "default":
        where = ""
    return ConfigProblem(
        dotted(path),
        "is required",
        where,
        meaning=schema.meaning_of(path),
        remedy=f"add {path[-1]} to the recipe, or pass {dotted(path)}=…",
    )


def _wrong_value(path: KeyPath, error: Mapping[str, Any], overlay: ConfigOverlay) -> ConfigProblem:
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    choices = list(map(str, schema.choices_at(path)))
    message = in_words(error, choices)
    bound = context.get("ge", context.get("le"))
    if choices:
        near = nearest(str(value), choices, count=1)
        if schema.takes_function(path):
            message += "; or module:function, a function of your own"
            meant = with_colon(str(value))
            if meant:
                near = [meant]
    elif bound is not None:
        near = [f"{bound:g}"]
    else:
        near = _meant(value, kind)
    if kind == "tuple_type" and schema.lists_texts(path) and isinstance(value, str):
        near = [as_toml([value])]
    key = dotted(path)
    remedy = ""
    if near:
        remedy = f"set {key}={near[0]}"
    return ConfigProblem(
        key,
        message,
        str(overlay.origin(path)),
        value=as_toml(value),
        nearest=tuple(near),
        meaning=schema.meaning_of(path),
        remedy=remedy,
    )


def in_words(error: Mapping[str, Any], choices: Sequence[str]) -> str:
    """Return what is wrong with a value by one of Pydantic's errors, in the words of a recipe.

    choices: all values that there are, where these are told one by one."""
    message: str = error["msg"]
    if error["type"] in _WORDS:
        words = {**error.get("ctx", {}), "choices": ", ".join(choices)}
        message = _WORDS[error["type"]].format(**words)
    return message


def _meant(value: Any, kind: str) -> list[str]:
    """`"2"` for a number, `True` for a bool, 2.0 for a whole number: what was surely meant."""
    text = str(value).strip()
    if kind == "bool_type":
        return nearest(text, ("true", "false"), count=1)
    if kind == "string_type" and value is not None and not isinstance(value, dict | list):
        return [f'"{text}"']
    if kind not in ("int_type", "int_from_float", "float_type") or isinstance(value, bool):
        return []
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return []
    if not math.isfinite(number):
        return []
    if kind == "float_type":
        return [f"{number:g}"]
    return [f"{number:.0f}"]


def _problem_of_violation(
    violation: Violation, config: RunConfig, overlay: ConfigOverlay
) -> ConfigProblem:
    near = []
    for valid_value in violation.nearest:
        if not isinstance(valid_value, str):
            valid_value = as_toml(valid_value)
        near.append(valid_value)
    related = []
    for key in violation.related:
        origin = _own_origin(key, overlay)
        if origin is not DEFAULT:
            related.append(f"{key} = {as_toml(value_at(config, key))} ({origin})")
    value = None
    if not violation.hides_value:
        value = as_toml(violation.value)
    remedy = violation.remedy
    if near and not remedy:
        remedy = f"set {violation.key}={near[0]}"
    return ConfigProblem(
        violation.key,
        violation.message,
        str(_own_origin(violation.key, overlay)),
        value=value,
        nearest=tuple(near),
        related=tuple(related),
        remedy=remedy,
    )


def _own_origin(key: str, overlay: ConfigOverlay) -> Origin:
    """Return who set a dotted key itself, not a table around it."""
    path: list[str | int] = []
    for part in key.split("."):
        if part.isdigit():
            path.append(int(part))
        else:
            path.append(part)
    return overlay.origins.get(tuple(path), DEFAULT)
