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
    text: str
    name: str  # dotted, in result.json; empty: of every domain
    compare: str
    limit: float
    against: Path | None = None  # a run directory

    def check(self, result: Mapping[str, Any]) -> str | None:
        """What was seen instead; None where the gate is open."""
        if self.against is None:
            value = _value(result, self.name)
            if isinstance(value, str):
                return value
            return None if _COMPARE[self.compare](value, self.limit) else f"{value:.4g}"
        before, after = (r.get("eval", {}) for r in (read_result(self.against), result))
        seen = [] if before.keys() - {"all"} else ["nothing was evaluated there"]
        for domain in sorted(before.keys() - {"all"}):
            if domain not in after:
                seen.append(f"{domain} was not evaluated")
            elif (drop := before[domain]["accuracy"] - after[domain]["accuracy"]) > self.limit:
                seen.append(f"{domain} drops {drop:.4g}")
        return ", ".join(seen) or None

    def below(self, root: Path) -> Self:
        """The gate of a run whose relative paths start at `root`."""
        return (
            self
            if self.against is None
            else replace(
                self,
                against=root / self.against,
                text=self.text.partition(" against ")[0] + f" against {root / self.against}",
            )
        )


def parse_gate(text: str, domains: Sequence[str] = ()) -> Gate:
    """The gate that `text` says (see SYNTAX). ConfigError for other text and, with `domains`, for a
    value that no run with these domains has in its `result.json`."""
    if found := _DROP.fullmatch(text.strip()):
        return Gate(text, "", "<=", float(found[1]), Path(found[2]))
    if found := _VALUE.fullmatch(text.strip()):
        known = ["seconds", "steps", "accelerator_hours", *(f"eval.{d}" for d in (*domains, "all"))]
        name = ".".join(found[1].split(".")[:2])
        if domains and name not in known:
            raise ConfigError(f"no run measures {name!r}", remedy=did_you_mean(name, known))
        return Gate(text, found[1], found[2], float(found[3]))
    raise ConfigError(f"{text!r} is not a gate", remedy=SYNTAX)


def read_result(run: Path) -> dict[str, Any]:
    """`result.json` of a finished run. ConfigError where there is none."""
    file = run / "result.json"
    with raised_as(ConfigError, "not a finished run", (OSError, ValueError), where=file):
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def _value(result: Mapping[str, Any], name: str) -> float | str:
    """A number, or what is there instead."""
    node: Any = result
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            known = ", ".join(node) if isinstance(node, Mapping) else "nothing"
            return f"no {part!r}; there is {known}"
        node = node[part]
    return float(node) if isinstance(node, int | float) else f"no number: {node}"
