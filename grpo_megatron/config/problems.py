"""What can be wrong with a recipe: rules between keys, in `rules.toml` what is said of each and its
condition, which longer ones have in Python; and how all of it is told at once."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from grpo_megatron import assets
from grpo_megatron.config.keys import value_at
from grpo_megatron.errors import ConfigError

Details = Mapping[str, Any]
"""What a rule's text needs beside the configuration; `nearest` and `related` replace its own."""
Conditions = Mapping[str, Callable[..., Any]]
"""By name: true where the rule is broken, or its details, or a list with those of each place."""
_TEXTS = assets.tables(__file__, "rules.toml")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule between keys that does not hold. Knows nothing of files and flags."""

    rule: str  # its short fixed name
    key: str  # dotted, to change
    value: Any  # of the key now
    message: str  # the rule in words, with every number that takes part
    nearest: tuple[Any, ...] = ()  # valid values of the key close to its value
    remedy: str = ""  # empty: use a nearest value
    related: tuple[str, ...] = ()  # other keys that take part


@dataclass(frozen=True, slots=True)
class Problem:
    key: str
    message: str
    where: str
    value: str | None = None
    nearest: tuple[str, ...] = ()
    remedy: str = ""
    related: tuple[str, ...] = ()
    meaning: str = ""

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}"]
        rows = (("value", self.value), ("set at", self.where),
                ("together with", "; ".join(self.related)), ("meaning", self.meaning),
                ("nearest", " or ".join(self.nearest)), ("fix", self.remedy))
        lines += [f"     {label + ':':<15}{text}" for label, text in rows if text]
        return "\n".join(lines)


class InvalidConfigError(ConfigError):
    """Everything that is wrong; `message` is a headline, or all if there are no `problems`."""

    def __init__(self, message: str, *, problems: Sequence[Problem] = (), **details: str | None):
        numbered = (f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__("\n".join([message, *numbered]), **details)
        self.problems = tuple(problems)


def stated(arguments: str) -> Conditions:
    """The conditions of these arguments that stand with their texts: `broken = "c: c.x > c.y"`."""
    texts = {f"{rule}.{variant}".rstrip("."): text for rule, variants in _TEXTS.items()
             for variant, text in ({"": variants} if "key" in variants else variants).items()}
    return {name: eval(f"lambda {text['broken']}") for name, text in texts.items()
            if text.get("broken", "").startswith(f"{arguments}:")}


def as_toml(value: Any) -> str:
    """A value as it would stand in a recipe; `null` where TOML has no word for it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def broken(conditions: Conditions, known: Details, *subject: Any) -> Iterator[Violation]:
    """The rules that do not hold for `subject`; `known` are the values of fields."""
    for name, details in cases_of(conditions, *subject):
        yield _violation(name, {**known, **details})


def cases_of(conditions: Conditions, *subject: Any) -> Iterator[tuple[str, Details]]:
    """(name, details) of each rule that does not hold for `subject`, once for every place where it
    is broken; the details are empty where the condition gives no more than true."""
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
