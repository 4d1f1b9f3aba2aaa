"""What can be wrong with a recipe, and how all of it is told at once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.errors import ConfigError


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
    """One thing that is wrong, ready to print."""

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

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None,
                 problems: Sequence[Problem] = ()):
        if problems:
            numbered = (f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
            message = "\n".join([message, *numbered])
        super().__init__(message, where=where, remedy=remedy)
        self.problems = tuple(problems)


def as_toml(value: Any) -> str:
    """A value as it would stand in a recipe; `null` where TOML has no word for it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
