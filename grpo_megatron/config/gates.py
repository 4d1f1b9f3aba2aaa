"""Gates: what a finished run must have reached, or what builds on it does not begin."""

import json
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from grpo_megatron.config.evaluated_share import UNSCORABLE, EvaluatedShare, share_of
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError, raised_as

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
OF_ALL = "all"
"""What results of all domains together are called; no domain is."""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NAME = r"[^\s<>=](?:[^<>=]*[^\s<>=])?"  # a domain's may have blanks
_VALUE = re.compile(rf"({_NAME}) *(>=|<=|>|<) *({_NUMBER})")
_DROP = re.compile(rf"no domain drops more than ({_NUMBER}) against (.+)")
_ACCURACY_OF_ALL = f"eval.{OF_ALL}.accuracy"
_SAMPLED = ("pass_at_", "majority_at_")
_SHARES = ("accuracy", "first_error", *_SAMPLED)
"""How the names of values between 0 and 1 begin."""
_FILES_OF_RUN = ("config.json", "result.json")
"""Of a run that has begun, or what was kept of one."""
_NEVER_NEGATIVE = ("seconds", "steps", "accelerator_hours", "prompts")
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
            share = _share(result, self.name)
            if share is not None and not share.is_reliable:
                return str(share)
            value = _value(result, self.name)
            if isinstance(value, str):
                return value
            if _COMPARE[self.compare](value, self.limit):
                return None
            return f"{value:.4g}"
        before = read_result(self.against).get("eval", {})
        after = result.get("eval", {})
        domains = sorted(before.keys() - {OF_ALL})
        if not domains:
            return "nothing was evaluated there"
        seen = []
        for domain in domains:
            if domain not in after:
                seen.append(f"{domain} was not evaluated")
                continue
            earlier = share_of(before[domain], "accuracy")
            now = share_of(after[domain], "accuracy")
            if not (earlier.is_reliable and now.is_reliable):
                seen.append(f"{domain} is {now}, was {earlier}")
                continue
            drop = earlier.value - now.value
            if not drop <= self.limit:  # NaN neither
                seen.append(f"{domain} drops {drop:.4g}")
        return ", ".join(seen) or None

    def below(self, root: Path) -> Self:
        """The gate of a run whose relative paths start at `root`."""
        if self.against is None:
            return self
        against = root / self.against
        condition = self.text.partition(" against ")[0]
        return replace(self, against=against, text=f"{condition} against {against}")


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a value can be at the end of a run: from `least` to `most`.

    Attributes:
        why_not_more, remedy: What is said where more is asked for."""

    least: float
    most: float = math.inf
    why_not_more: str = ""
    remedy: str = ""


def parse_gate(text: str, measured: Collection[str] | None = None) -> Gate:
    """Return the gate that `text` says (see SYNTAX). Raises ConfigError for other text and, with
    `measured`, the dotted names in a run's `result.json`, for a gate that cannot be open: of
    another name, or of a limit that no share has."""
    drop = _DROP.fullmatch(text.strip())
    if drop is not None:
        gate = Gate(text, "", "<=", float(drop[1]), Path(drop[2]))
    else:
        value = _VALUE.fullmatch(text.strip())
        if value is None:
            raise ConfigError(f"{text!r} is not a gate", remedy=SYNTAX)
        gate = Gate(text, value[1], value[2], float(value[3]))
    if measured is not None:
        _refuse_unmeasured(gate, measured)
        _refuse_beyond_shares(gate)
    return gate


def result_names(run: RunConfig) -> list[str]:
    """Return the dotted names of what gates may ask of the run's `result.json`: those of the run
    and, as its evaluator writes them (`controller/evaluation.py` and its neighbours), those of each
    domain and of `all`."""
    shares = ["accuracy"]
    others = ["prompts"]
    if not run.trains_preferences:
        num_samples = run.evaluation.num_samples
        sizes = {num_samples} | {2**power for power in range(num_samples.bit_length())}
        for k in sorted(sizes - {0}):
            shares += [f"{name}{k}" for name in _SAMPLED]
        for share in shares:
            others.append(share + UNSCORABLE)
    elif run.preferences.rows == "steps":
        others += ["steps", "loss", "first_error"]
    else:
        others += ["loss"]
        if run.preferences.is_paired:
            others += ["margin"]
    bounds = []
    for share in shares:
        bounds += [f"{share}_low", f"{share}_high"]
    names = ["seconds", "steps", "accelerator_hours"]
    if not run.data.num_heldout:
        return [*names, f"eval.{OF_ALL}.prompts"]
    for domain in run.domains:
        names += [f"eval.{domain.name}.{name}" for name in (*shares, *bounds, *others)]
    names += [f"eval.{OF_ALL}.{name}" for name in (*shares, *others)]
    return names


def _refuse_unmeasured(gate: Gate, measured: Collection[str]) -> None:
    name = gate.name
    if gate.against is not None:
        name = _ACCURACY_OF_ALL
    if name in measured:
        return
    if name.startswith("eval.") and _ACCURACY_OF_ALL not in measured:
        raise ConfigError(
            f"{gate.text!r} can never be open: no prompts are held out, and nothing is evaluated",
            remedy="set data.num_heldout to the number of prompts to evaluate",
        )
    remedy = did_you_mean(gate.name, measured)
    samples_are_measured = any(_is_of_samples(known) for known in measured)
    if _is_of_samples(gate.name) and not samples_are_measured:
        remedy = "set evaluation.num_samples to the samples of a prompt"
    raise ConfigError(f"no run like this measures {gate.name!r}", remedy=remedy)


def _is_of_samples(name: str) -> bool:
    """Whether a value is of several samples of a prompt."""
    return any(kind in name for kind in _SAMPLED)


def _refuse_beyond_shares(gate: Gate) -> None:
    """ConfigError where an accuracy would have to lie outside of 0 to 1."""
    metric = gate.name.rpartition(".")[2]
    is_share = metric.startswith(_SHARES) and not metric.endswith(UNSCORABLE)
    if gate.against is None and not is_share:
        return
    is_beyond = not 0 <= gate.limit <= 1
    is_never = (gate.compare, gate.limit) in ((">", 1), ("<", 0))
    if is_beyond or is_never:
        raise ConfigError(
            f"{gate.text!r} asks for what no accuracy is: they lie between 0 and 1",
            remedy="write a share, 0.6 for 60 %",
        )


def refuse_beyond_reach(gate: Gate, run: RunConfig | None = None) -> None:
    """Raise ConfigError for a gate that cannot be open: it asks for less than 0 seconds or steps,
    for more steps than the run has, or for another number of prompts than it evaluates.

    run: None where nothing is trained or evaluated, as by a merge."""
    if gate.against is not None:
        return
    reach = _reach(gate.name, run)
    if reach is None:
        return
    is_below = gate.compare in ("<", "<=") and not _COMPARE[gate.compare](reach.least, gate.limit)
    if is_below:
        raise ConfigError(
            f"{gate.text!r} can never be open: {gate.name} is never below {reach.least:g}",
            remedy=f"write a limit above {reach.least:g}",
        )
    is_above = gate.compare in (">", ">=") and not _COMPARE[gate.compare](reach.most, gate.limit)
    if is_above:
        raise ConfigError(
            f"{gate.text!r} can never be open: {reach.why_not_more}", remedy=reach.remedy
        )


def _reach(name: str, run: RunConfig | None) -> _Reach | None:
    """Return what a value of a run can be; None where nothing bounds it."""
    if name == "steps":
        return _reach_of_steps(run)
    metric = name.rpartition(".")[2]
    if run is not None and (metric == "prompts" or metric.endswith(UNSCORABLE)):
        return _reach_of_prompts(name, run)
    if metric in _NEVER_NEGATIVE:
        return _Reach(0)
    return None


def _reach_of_steps(run: RunConfig | None) -> _Reach:
    num_steps = 0
    if run is not None:
        num_steps = run.num_steps
    remedy = f"write steps >= {num_steps}, or raise num_steps"
    if num_steps == 0:  # of an evaluation, for example
        remedy = "leave it out: the run trains nothing"
    return _Reach(0, num_steps, f"the run has num_steps = {num_steps}", remedy)


def _reach_of_prompts(name: str, run: RunConfig) -> _Reach:
    """Return how many prompts there can be in what is measured of `all`, or of a domain, as
    `make_splits` and `split_by_prompt` hold them out: preferences of equal prompts together, and
    perhaps more than `num_heldout` for that reason."""
    num_heldout = run.data.num_heldout
    num_others = len(run.domains) - 1
    _, domain, metric = name.split(".")
    least = num_heldout
    most = num_heldout
    if domain != OF_ALL and num_others:
        least = min(num_heldout, 1)  # a domain without any has no results
        most = max(num_heldout - num_others, least)
        if num_heldout <= num_others:  # nobody knows which domains have one
            most = num_heldout
    if metric != "prompts":
        least = 0
    if run.trains_preferences and num_heldout:
        return _Reach(least)
    remedy = f"write {name} >= {most}, or raise data.num_heldout"
    if not num_heldout:
        remedy = "set data.num_heldout to the number of prompts to evaluate"
    why_not_more = f"{name} is at most {most}, of data.num_heldout = {num_heldout}"
    return _Reach(least, most, why_not_more, remedy)


def refuse_absent_runs(texts: Sequence[str]) -> None:
    """Raise ConfigError for a gate that compares with a run that has not begun: nothing is at its
    path, which the gate would read at the end."""
    for text in texts:
        against = parse_gate(text).against
        if against is None or any((against / file).exists() for file in _FILES_OF_RUN):
            continue
        raise ConfigError(
            f"gate {text!r} compares with a run that is not there",
            where=str(against.absolute()),
            remedy="name the directory of a run, from the directory the command runs in; or run "
            "that one first",
        )


def evaluated_domains(run: RunConfig) -> list[str]:
    """Return the names of domains that the run surely evaluates: with fewer prompts held out than
    domains nobody knows which have one."""
    if run.data.num_heldout < len(run.domains):
        return []
    return [domain.name for domain in run.domains]


def closed_gates(texts: Sequence[str], result: Mapping[str, Any]) -> list[str]:
    """Return those of the gates that a finished run misses, each with what was seen."""
    closed = []
    for text in texts:
        gate = parse_gate(text)
        seen = gate.check(result)
        if seen is not None:
            closed.append(f"{gate.text} (seen: {seen})")
    return closed


def read_result(run: Path) -> dict[str, Any]:
    """`result.json` of a finished run: `seconds`, and in `eval` tables of numbers by domain, of
    what was evaluated. ConfigError where there is none, or a damaged one."""
    file = run / "result.json"
    with raised_as(ConfigError, "not a finished run", OSError, where=file):
        content = file.read_bytes()
    unreadable = (ValueError, RecursionError)
    with raised_as(ConfigError, "result.json is damaged", unreadable, where=file):
        result: dict[str, Any] = json.loads(content)
    damage = _damage_of(result)
    if damage:
        raise ConfigError(
            f"result.json is damaged: {damage}",
            where=str(file),
            remedy="remove the file and resume the run, which writes it again",
        )
    return result


def _damage_of(result: object) -> str:
    """Return what no finished run writes into `result.json`; empty where it may be one's."""
    if not isinstance(result, dict):
        return "no table"
    if not _is_number(result.get("seconds")):
        return "no seconds"
    evaluation = result.get("eval", {})
    if not isinstance(evaluation, dict):
        return "eval is no table"
    for domain, values in evaluation.items():
        if not isinstance(values, dict):
            return f"eval.{domain} is no table"
        for name, value in values.items():
            if not _is_number(value):
                return f"eval.{domain}.{name} is no number"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _share(result: Mapping[str, Any], name: str) -> EvaluatedShare | None:
    """Return the share that a dotted name or its bound (`_low`, `_high`) is of; None where it is no
    value of an evaluation."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "eval":
        return None
    values = result.get("eval", {}).get(parts[1])
    if values is None:
        return None
    return share_of(values, parts[2].removesuffix("_low").removesuffix("_high"))


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
