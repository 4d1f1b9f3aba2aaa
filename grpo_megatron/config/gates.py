"""Gates: what a finished run must have reached, or what builds on it does not begin."""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError, raised_as

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_VALUE = re.compile(r"([\w.@-]+) *(>=|<=|>|<) *(-?\d*\.?\d+(?:e-?\d+)?)")
_DROP = re.compile(r"no domain drops more than (\d*\.?\d+) against (.+)")
SYNTAX = (
    "write eval.DOMAIN.METRIC >= NUMBER (eval.all for all prompts; also seconds, "
    "steps, accelerator_hours), or: no domain drops more than 0.02 against RUN"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on a finished run's `result.json`."""

    text: str
    name: str  # dotted, in result.json; empty: of every domain
    compare: str
    limit: float
    against: Path | None = None  # a run directory

    def check(self, result: Mapping[str, Any]) -> str | None:
        """Return what was seen instead; None where the gate is open."""
        if self.against is None:
            value = _value(result, self.name)
            if isinstance(value, str):
                return value
            if _COMPARE[self.compare](value, self.limit):
                return None
            return f"{value:.4g}"
        before = read_result(self.against).get("eval", {})
        after = result.get("eval", {})
        domains = sorted(before.keys() - {"all"})
        if not domains:
            return "nothing was evaluated there"
        seen = []
        for domain in domains:
            if domain not in after:
                seen.append(f"{domain} was not evaluated")
                continue
            drop = before[domain]["accuracy"] - after[domain]["accuracy"]
            if drop > self.limit:
                seen.append(f"{domain} drops {drop:.4g}")
        return ", ".join(seen) or None

    def below(self, root: Path) -> Self:
        """The gate of a run whose relative paths start at `root`."""
        if self.against is None:
            return self
        against = root / self.against
        condition = self.text.partition(" against ")[0]
        return replace(self, against=against, text=f"{condition} against {against}")


def parse_gate(text: str, domains: Sequence[str] = ()) -> Gate:
    """Return the gate that `text` says (see SYNTAX). Raises ConfigError for other text and, with
    `domains`, for a value that no run with these domains has in its `result.json`."""
    drop = _DROP.fullmatch(text.strip())
    if drop is not None:
        return Gate(text, "", "<=", float(drop[1]), Path(drop[2]))
    value = _VALUE.fullmatch(text.strip())
    if value is None:
        raise ConfigError(f"{text!r} is not a gate", remedy=SYNTAX)
    known = ["seconds", "steps", "accelerator_hours"]
    known += [f"eval.{domain}" for domain in (*domains, "all")]
    name = ".".join(value[1].split(".")[:2])
    if domains and name not in known:
        raise ConfigError(f"no run measures {name!r}", remedy=did_you_mean(name, known))
    return Gate(text, value[1], value[2], float(value[3]))


def read_result(run: Path) -> dict[str, Any]:
    """`result.json` of a finished run. ConfigError where there is none, or a damaged one."""
    file = run / "result.json"
    with raised_as(ConfigError, "not a finished run", OSError, where=file):
        content = file.read_bytes()
    with raised_as(ConfigError, "result.json is damaged", ValueError, where=file):
        result = json.loads(content)
    if not isinstance(result, dict):
        raise ConfigError("result.json is damaged: no table", where=str(file))
    return result


def _value(result: Mapping[str, Any], name: str) -> float | str:
    """Return a number, or what is there instead."""
    node: Any = result
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            known = "nothing"
            if isinstance(node, Mapping):
                known = ", ".join(node)
            return f"no {part!r}; there is {known}"
        node = node[part]
    if not isinstance(node, int | float):
        return f"no number: {node}"
    return float(node)
