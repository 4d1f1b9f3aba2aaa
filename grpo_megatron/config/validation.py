"""From a merged tree to a `RunConfig`, or to the list of everything that is wrong with it."""

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from grpo_megatron.config.constraints import check_constraints
from grpo_megatron.config.keys import KeyPath, dotted, value_at
from grpo_megatron.config.messages import problem_of
from grpo_megatron.config.problems import InvalidConfigError, Problem, Violation, as_toml
from grpo_megatron.config.provenance import DEFAULT, Layers, Origin
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.schema import nearest_keys

Check = Callable[[RunConfig], list[Violation]]
"""A rule set over a whole, well-typed configuration."""


def valid(layers: Layers, problems: Sequence[Problem], checks: Sequence[Check],
          source: str) -> RunConfig:
    """The configuration of `layers`, where it keeps all rules and there are no `problems` yet.

    Rules run even when some keys are wrong, on what is left without these keys; what a rule
    says about a wrong key is dropped then, because its intended value is not known.

    Raises:
        ConfigError: Everything that is wrong, at once.
    """
    config, errors = _parse(layers.tree)
    found = [*problems, *(problem_of(error, layers) for error in errors)]
    if errors:
        config, _ = _parse(_without(layers.tree, [error["loc"] for error in errors]))
    if config is not None:
        unsure = _unsure_keys(errors)
        found += [_problem_of_violation(violation, config, layers)
                  for check in (check_constraints, *checks) for violation in check(config)
                  if not any(f"{key}.".startswith(f"{wrong}.") for wrong in unsure
                             for key in (violation.key, *violation.related))]
    if found:
        count = f"{len(found)} problem" + "s" * (len(found) > 1)
        raise InvalidConfigError(f"{count} in {source}; nothing was started", problems=found)
    return config


def _parse(tree: dict[str, Any]) -> tuple[RunConfig | None, list[dict[str, Any]]]:
    """Strict JSON mode: no `"2"` for 2, but lists for tuples and text for paths."""
    try:
        return RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # "list too short" is an echo where elements were left out only because they are wrong
    return None, [error for error in errors if error["type"] != "too_short" or not any(
        other["loc"][:len(error["loc"])] == error["loc"] for other in errors
        if other is not error)]


def _unsure_keys(errors: Sequence[dict[str, Any]]) -> set[str]:
    """The wrong keys, and what the unknown ones may stand for."""
    return {dotted(error["loc"]) for error in errors} | {
        key for error in errors if error["type"] == "extra_forbidden"
        for key in nearest_keys(error["loc"])}


def _without(tree: dict[str, Any], paths: Sequence[KeyPath]) -> dict[str, Any]:
    """A copy without the nodes at `paths`; list elements stay, so that indices keep meaning."""
    tree = copy.deepcopy(tree)
    for path in paths:
        node: Any = tree
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for part in path[:-1]:
                node = node[part]
            if isinstance(node, dict):
                node.pop(path[-1], None)
    return tree


def _problem_of_violation(violation: Violation, config: RunConfig, layers: Layers) -> Problem:
    def origin(key: str) -> Origin:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        return layers.origins.get(path, DEFAULT)

    nearest = tuple(value if isinstance(value, str) else as_toml(value)
                    for value in violation.nearest)
    related = tuple(f"{key} = {as_toml(value_at(config, key))} ({origin(key)})"
                    for key in violation.related if origin(key) is not DEFAULT)
    remedy = violation.remedy
    if not remedy and nearest:
        remedy = f"set {violation.key}={nearest[0]}"
    return Problem(violation.key, violation.message, str(origin(violation.key)),
                   value=as_toml(violation.value), nearest=nearest, remedy=remedy,
                   related=related)
