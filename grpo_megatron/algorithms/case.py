"""CASE.json: a small batch by hand, for `grpo-megatron objective eval`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages.pipeline import Advantages
from grpo_megatron.algorithms.batch import DroppedRewards, Events, SampleBatch
from grpo_megatron.algorithms.running_distribution import RunningDistribution
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import DataError, raised_as

_LARGEST = 1e150  # squares stay finite
_double = partial(torch.tensor, dtype=torch.float64)
_WORDS: dict[str, str] = {
    "missing": "is missing",
    "list_type": "is not a list",
    "dict_type": "is not an object",
    "too_short": "has no samples",
    "extra_forbidden": "is no field of a case",
    "literal_error": "is {input!r}, not 0 or 1",
    "int_type": "is {input!r}, not a whole number of at least 0 (32 bit)",
    "greater_than_equal": "is {input!r}, not a whole number of at least 0 (32 bit)",
    "less_than": "is {input!r}, not a whole number of at least 0 (32 bit)",
}
"""What is wrong with a field, by pydantic's name of the error."""


@dataclass(frozen=True)
class Case:
    """A checked case; token columns hold policy tokens only."""

    batch: SampleBatch
    domains: tuple[str, ...]
    columns: Mapping[str, Tensor]  # [n] float64: logprobs, old_, rollout_, ref_logprobs, entropies
    mask: Sequence[Sequence[bool]]  # of all tokens
    truncated: Tensor  # bool [N]
    advantages: Advantages | None  # given instead of rewards
    state: Mapping[str, Any]  # of the objective, see `Objective.state`


def _number(value: Any, *, null: bool = False, infinite: bool = False) -> float:
    if value is None and null:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is {value!r}, not a number")
    if value != value and not null:
        raise ValueError("is NaN", "null and NaN are for rewards (unscorable) only")
    endless = value in (math.inf, -math.inf)
    if abs(value) > _LARGEST and not (endless and infinite):
        raise ValueError("is infinite" if endless else "is too large")
    return float(value)


def _label(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"is {value!r}, not a name or a whole number")
    return value


Number = Annotated[float, pydantic.PlainValidator(_number)]
Reward = Annotated[float, pydantic.PlainValidator(partial(_number, null=True))]
LogProb = Annotated[float, pydantic.PlainValidator(partial(_number, infinite=True))]
Whole = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31)]
Flag = Literal[0, 1, False, True]
Label = Annotated[int | str, pydantic.PlainValidator(_label)]


class _Step(pydantic.BaseModel):
    """`[end, reward]` or a table; `end` counts all tokens of the sample."""

    end: int
    reward: Number

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        keys = list(cls.model_fields)
        if isinstance(value, list) and len(value) == len(keys):
            value = dict(zip(keys, value, strict=True))
        if not isinstance(value, dict) or type(value.get("end")) is not int:
            raise ValueError(f"is not {', '.join(keys)}")
        return {"reward": None, "state": None} | value


class _Turn(_Step):
    state: Any


class _Document(pydantic.BaseModel):
    """The fields of a case. Ragged lists have one list per sample, one value per token."""

    model_config = pydantic.ConfigDict(extra="forbid")
    logprobs: list[list[LogProb]] = pydantic.Field(min_length=1)
    old_logprobs: list[list[LogProb]] | None = None
    rollout_logprobs: list[list[LogProb]] | None = None
    ref_logprobs: list[list[LogProb]] | None = None
    entropies: list[list[Number]] | None = None
    token_ids: list[list[Whole]] | None = None
    loss_mask: list[list[Flag]] | None = None
    rewards: list[Reward] | None = None
    advantages: (
        Annotated[
            Annotated[list[Number], pydantic.Tag("samples")]
            | Annotated[list[list[Number]], pydantic.Tag("tokens")],
            pydantic.Discriminator(
                lambda rows: (
                    "tokens"
                    if isinstance(rows, list) and any(isinstance(row, list) for row in rows)
                    else "samples"
                )
            ),
        ]
        | None
    ) = None
    group_ids: list[Label] | None = None
    domains: list[Label] | None = None
    truncated: list[Flag] | None = None
    sample_ids: list[Whole] | None = None
    steps: list[list[_Step]] | None = None
    turns: list[list[_Turn]] | None = None
    components: dict[str, list[Reward]] = {}
    component_weights: dict[str, Number] = {}
    correct: list[Flag] | None = None
    dropped_rewards: dict[str, list[Number]] = {}
    earlier_success: dict[str, list[Number]] = {}


_RAGGED = (
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "entropies",
    "token_ids",
    "loss_mask",
)


def read_case(path: Path) -> Case:
    """Raises DataError naming file, field and index."""
    with raised_as(DataError, "cannot read the case as JSON", (OSError, ValueError), where=path):
        document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise DataError("a case is a JSON object", where=str(path))
    return parse_case(document, where=str(path))


def parse_case(document: Mapping[str, Any], *, where: str = "case") -> Case:
    """Check a case and lay its ragged lists flat."""
    try:
        given = _Document.model_validate(document)
        _check_lengths(given)
        return _case(given)
    except pydantic.ValidationError as error:
        told = _told(error.errors()[0])
    except ValueError as error:
        told = error.args
    raise DataError(told[0], where=where, remedy=(*told, None)[1])


def _told(error: Mapping[str, Any]) -> tuple[str, ...]:
    """What pydantic found, as place and fault, and perhaps the remedy."""
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in error["loc"]
        if part not in ("samples", "tokens")
    )[1:]
    if error["type"] == "value_error":
        what, *remedy = error["ctx"]["error"].args
        return f"{place} {what}", *remedy
    remedy = ()
    if error["type"] == "extra_forbidden":
        remedy = (did_you_mean(place, _Document.model_fields),)
    return f"{place} {_WORDS.get(error['type'], error['msg']).format(**error)}", *remedy


def _check_lengths(given: _Document) -> None:
    counts = [len(row) for row in given.logprobs]
    per_sample = {name: values for name, values in given if isinstance(values, list)}
    per_sample |= {f"components.{name}": values for name, values in given.components.items()}
    for name, values in per_sample.items():
        if len(values) != len(counts):
            raise ValueError(
                f"{name} has {len(values)} entries, logprobs has {len(counts)}",
                "one entry per sample",
            )
        if name in _RAGGED or (name == "advantages" and isinstance(values[0], list)):
            for i, (row, count) in enumerate(zip(values, counts, strict=True)):
                if len(row) != count:
                    raise ValueError(
                        f"{name}[{i}] has {len(row)} tokens, logprobs[{i}] has {count}"
                    )


def _case(given: _Document) -> Case:
    size = len(given.logprobs)
    mask = _mask(given)
    columns = {}
    for name in ("logprobs", *_RAGGED[:-1]):
        rows = getattr(given, name)
        if rows:
            dtype = torch.int64 if name == "token_ids" else torch.float64
            columns[name] = _flat(rows, mask, dtype)
    columns.setdefault("old_logprobs", columns["logprobs"])
    columns.setdefault("rollout_logprobs", columns["old_logprobs"])
    names, domains = _labels("domains", given.domains, size)
    _, groups = _labels("group_ids", given.group_ids, size)
    of_group: dict[int, int] = {}
    for i, (group, domain) in enumerate(zip(groups.tolist(), domains.tolist(), strict=True)):
        if of_group.setdefault(group, domain) != domain:
            raise ValueError(
                f"domains[{i}] differs from the domain of its group",
                "a group has one prompt, hence one domain",
            )
    ids = given.sample_ids or range(size)
    if len(set(ids)) < size:
        raise ValueError("sample_ids are not unique")
    rewards, components, weights = _rewards(given, size)
    batch = SampleBatch(
        rewards,
        groups,
        torch.tensor([sum(row) for row in mask]),
        torch.tensor(ids),
        domains,
        torch.ones(size, dtype=torch.bool),
        components,
        weights,
        events=_events(given, mask),
        correct=None if given.correct is None else torch.tensor(given.correct, dtype=torch.bool),
        dropped=_dropped(given, names),
        tokens={n: c for n, c in columns.items() if n not in ("logprobs", "rollout_logprobs")},
    )
    return Case(
        batch,
        names,
        columns,
        mask,
        torch.tensor(given.truncated or [False] * size),
        _given_advantages(given, mask),
        _state(given, names),
    )


def _mask(given: _Document) -> list[list[bool]]:
    """Which of all tokens are policy tokens."""
    if given.loss_mask:
        return [[bool(flag) for flag in row] for row in given.loss_mask]
    return [[True] * len(row) for row in given.logprobs]


def _flat(
    rows: Sequence[Sequence[float]], mask: Sequence[Sequence[bool]], dtype: torch.dtype
) -> Tensor:
    """The policy tokens of ragged rows, one after another. [n]"""
    return torch.tensor(list(compress(chain(*rows), chain(*mask))), dtype=dtype)


def _given_advantages(given: _Document, mask: Sequence[Sequence[bool]]) -> Advantages | None:
    """Those of the case itself, by sample or by token."""
    rows: Any = given.advantages
    if rows is None:
        return None
    if isinstance(rows[0], list):
        return Advantages(_flat(rows, mask, torch.float64), per_token=True)
    return Advantages(_double(rows), per_token=False)


def _dropped(given: _Document, domains: Sequence[str]) -> DroppedRewards | None:
    """Rewards of groups that the sampler did not keep."""
    rewards: list[float] = []
    domain_of: list[int] = []
    for domain, values in given.dropped_rewards.items():
        rewards += values
        domain_of += [_domain_number("dropped_rewards", domain, domains)] * len(values)
    if not rewards:
        return None
    return DroppedRewards(_double(rewards), torch.tensor(domain_of))


def _state(given: _Document, domains: Sequence[str]) -> dict[str, Any]:
    """What the objective learned from earlier steps: mean rewards of their groups, for the scope of
    every domain and for that of all together."""
    state: dict[str, Any] = {}
    every_value: list[float] = []
    for domain, values in given.earlier_success.items():
        _domain_number("earlier_success", domain, domains)
        state[f"success@{domain}"] = _distribution(values)
        every_value += values
    if every_value:
        state["success"] = _distribution(every_value)
    return state


def _distribution(values: Sequence[float]) -> list[list[float]]:
    return RunningDistribution.from_state([]).with_values(np.asarray(values, np.float64)).state


def _domain_number(field: str, domain: str, domains: Sequence[str]) -> int:
    if domain not in domains:
        raise ValueError(
            f"{field}.{domain} is no domain of the case", f"its domains: {', '.join(domains)}"
        )
    return domains.index(domain)


def _rewards(given: _Document, size: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Rewards, components and their weights, float64 [N] each."""
    if stray := [name for name in given.component_weights if name not in given.components]:
        raise ValueError(f"component_weights.{stray[0]} belongs to no component")
    components = {name: _double(values) for name, values in given.components.items()}
    weights = {
        name: _double([given.component_weights.get(name, 1.0)] * size) for name in components
    }
    if given.rewards is not None:
        return _double(given.rewards), components, weights
    if not components and given.advantages is None:
        raise ValueError("rewards is missing", "give rewards, components or advantages")
    parts = [torch.nan_to_num(values) * weights[name] for name, values in components.items()]
    return sum(parts, torch.zeros(size).double()), components, weights


def _labels(
    name: str, values: Sequence[int | str] | None, size: int
) -> tuple[tuple[str, ...], Tensor]:
    """Names in order of appearance, int64 [N] of indices; numbers are indices themselves."""
    if values is None:
        return ("all",), torch.zeros(size, dtype=torch.int64)
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) < len(values):
        names = tuple(dict.fromkeys(map(str, values)))
        return names, torch.tensor([names.index(str(value)) for value in values])
    if min(numbers) < 0:
        raise ValueError(f"{name}[{numbers.index(min(numbers))}] is negative")
    count = max(numbers) + 1
    empty = set(range(count)) - set(numbers)
    if empty:
        raise ValueError(f"{name} leaves {min(empty)} empty", "number from 0 without gaps")
    return tuple(map(str, range(count))), torch.tensor(numbers)


def _events(given: _Document, mask: Sequence[Sequence[bool]]) -> Events | None:
    """Rewards inside samples, at policy tokens."""
    if given.steps is not None and given.turns is not None:
        raise ValueError("turns and steps exclude each other")
    name = "steps" if given.turns is None else "turns"
    rows: Sequence[Sequence[_Step]] | None = given.steps
    if given.turns is not None:
        rows = given.turns
    if rows is None:
        return None
    places: list[tuple[int, int]] = []  # sample, last policy token
    for i, row in enumerate(rows):
        for k, event in enumerate(row):
            if not 0 <= event.end < len(mask[i]):
                raise ValueError(f"{name}[{i}][{k}] ends at token {event.end} of {len(mask[i])}")
            places.append((i, sum(mask[i][: event.end + 1]) - 1))
            if places[-1][1] < 0:
                raise ValueError(f"{name}[{i}][{k}] has no policy token")
    if name == "turns" and len(set(places)) < len(places):
        raise ValueError("turns has two turns that end with the same policy token")
    sample, end = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    reward = _double([event.reward for event in chain(*rows)])
    if given.turns is None:
        return Events(sample, end, reward)
    states = [str(turn.state) for turn in chain(*given.turns)]
    number_of = {state: number for number, state in enumerate(dict.fromkeys(states))}
    state = torch.tensor([number_of[name] for name in states], dtype=torch.int64)
    return Events(sample, end, reward, state)
