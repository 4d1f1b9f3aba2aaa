"""Rules between keys: a condition in Python for each, and what is said in `rules.toml`."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.config.keys import value_at
from grpo_megatron.config.problems import Violation

Conditions = Mapping[str, Callable[..., Any]]
"""By name: true where the rule is broken, or what its text needs to know beside the configuration:
one mapping, or a list with one for each place where it is broken. `nearest` and `related` in it
take the place of those in the text."""


_TEXTS = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def broken(conditions: Conditions, known: Mapping[str, Any], *subject: Any) -> Iterator[Violation]:
    """The rules that do not hold for `subject`; `known` are the values of fields."""
    for name, details in cases_of(conditions, *subject):
        yield _violation(name, {**known, **details})


def cases_of(conditions: Conditions, *subject: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, is_broken in conditions.items():
        found = is_broken(*subject)
        for details in found if isinstance(found, list) else [found] if found else []:
            yield name, details if isinstance(details, Mapping) else {}


def _violation(name: str, known: dict[str, Any]) -> Violation:
    rule, _, variant = name.partition(".")
    text = _TEXTS[rule][variant] if variant else _TEXTS[rule]

    def filled(name: str) -> tuple[Any, ...]:
        parts = known.get(name) or text.get(name, ())
        return tuple(part.format(**known) if isinstance(part, str) else part for part in parts)

    key = text["key"].format(**known)
    remedy = "" if known.get("nearest") else text.get("remedy", "").format(**known)
    return Violation(rule, key, value_at(known["c"], key), text["message"].format(**known),
                     filled("nearest"), remedy, filled("related"))
