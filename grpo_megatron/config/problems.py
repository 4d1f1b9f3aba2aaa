"""How everything that is wrong with a recipe is reported at once: key, value, place, fix."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from grpo_megatron.config.secret_values import is_secret_name, without_secrets
from grpo_megatron.errors import ConfigError, row_of


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong with a recipe, told without its secrets."""

    key: str
    message: str
    where: str
    value: str | None = None
    nearest: tuple[str, ...] = ()
    remedy: str = ""
    related: tuple[str, ...] = ()
    meaning: str = ""

    def __post_init__(self) -> None:
        # frozen for everybody else
        if self.value is not None:
            object.__setattr__(self, "value", without_secrets(self.value))
        for name in ("message", "where", "remedy"):
            object.__setattr__(self, name, without_secrets(getattr(self, name)))
        object.__setattr__(self, "related", tuple(map(without_secrets, self.related)))
        if is_secret_name(self.key.rpartition(".")[2]):
            object.__setattr__(self, "value", None)
            object.__setattr__(self, "nearest", ())

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}"]
        rows = (
            ("value", self.value),
            ("set at", self.where),
            ("together with", "; ".join(self.related)),
            ("meaning", self.meaning),
            ("nearest", " or ".join(self.nearest)),
            ("fix", self.remedy),
        )
        for label, text in rows:
            if text:
                lines.append(row_of(f"     {label + ':':<15}", text))
        return "\n".join(lines)


class InvalidConfigError(ConfigError):
    """Everything that is wrong; `message` is a headline, or all if there are no `problems`."""

    def __init__(
        self, message: str, *, problems: Sequence[ConfigProblem] = (), **details: str | None
    ):
        numbered = (f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__("\n".join([message, *numbered]), **details)
        self.problems = tuple(problems)


def as_toml(value: Any) -> str:
    """Return a value as it would stand in a recipe; `null` where TOML has no word for it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
