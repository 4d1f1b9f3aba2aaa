"""CASE.json: a small batch by hand, for `grpo-megatron objective eval`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Advantages, DroppedRewards, Events, SampleBatch
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
    advantages: Advantages | None  # given instead of what the objective makes of rewards
    has_rewards: bool  # or components, of which they are the sum
    state: Mapping[str, Any]  # of the objective, see `Objective.state`


def _number(value: Any, *, null: bool = False, infinite: bool = False) -> float:
    if value is None and null:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is {value!r}, not a number")
    if value != value and not null:
        raise ValueError("is NaN", "null and NaN are for rewards (unscorable) only")
    if abs(value) == math.inf:
        if not infinite:
            raise ValueError("is infinite")
    elif abs(value) > _LARGEST:
        raise ValueError("is too large")
    return float(value)


def _label(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"is {value!r}, not a name or a whole number")
    return value


def _share(value: Any) -> float:
    share = _number(value)
    if not 0 <= share <= 1:
        raise ValueError(f"is {value!r}, not within 0 and 1")
    return share


Number = Annotated[float, pydantic.PlainValidator(_number)]
Reward = Annotated[float, pydantic.PlainValidator(partial(_number, null=True))]
LogProb = Annotated[float, pydantic.PlainValidator(partial(_number, infinite=True))]
Share = Annotated[float, pydantic.PlainValidator(_share)]
Whole = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31)]
Flag = Literal[0, 1, False, True]
Label = Annotated[int | str, pydantic.PlainValidator(_label)]


class _Step(pydantic.BaseModel):
    """`[end, reward]` or a table; `end` is the place of the last token, from 0, among all tokens of
    the sample, masked ones included."""

    end: int
    reward: Number

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        keys = [key for key, field in cls.model_fields.items() if key != "spoilt"]
        if isinstance(value, list) and len(value) == len(keys):
            value = dict(zip(keys, value, strict=True))
        if not isinstance(value, dict) or type(value.get("end")) is not int:
            raise ValueError(f"is not {', '.join(keys)}")
        return {"reward": None, "state": None} | value


class _Turn(_Step):
    """`[end, reward, state]` or a table, which may say too that a turn is `spoilt`."""

    reward: Reward
    state: Any
    spoilt: Flag = 0


def _advantages_kind(rows: Any) -> str:
    """Whether advantages are given by sample or by token."""
    if isinstance(rows, list) and any(isinstance(row, list) for row in rows):
        return "tokens"
    return "samples"


class _Document(pydantic.BaseModel):
    """The fields of a case. Ragged lists have one list per sample, one value per token."""

    model_config = pydantic.ConfigDict(extra="forbid")
    logprobs: list[list[LogProb]] = pydantic.Field(min_length=1)
    old_logprobs: list[list[LogProb]] | None = None
    rollout_logprobs: list[list[LogProb]] | None = None
    ref_logprobs: list[list[LogProb]] | None = None
    entropies: list[list[Number]] | None = None
    squared_probs: list[list[Share]] | None = None
    values: list[list[Number]] | None = None
    token_ids: list[list[Whole]] | None = None
    staleness: list[list[Whole]] | None = None
    router_shift: list[list[Share]] | None = None
    loss_mask: list[list[Flag]] | None = None
    rewards: list[Reward] | None = None
    advantages: (
        Annotated[
            Annotated[list[Number], pydantic.Tag("samples")]
            | Annotated[list[list[Number]], pydantic.Tag("tokens")],
            pydantic.Discriminator(_advantages_kind),
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
    "squared_probs",
    "values",
    "token_ids",
    "staleness",
    "router_shift",
    "loss_mask",
)


def read_case(path: Path) -> Case:
    """Read and check a case. Raises DataError naming file, field and index."""
    with raised_as(DataError, "cannot read the case as JSON", (OSError, ValueError), where=path):
        document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise DataError("a case is a JSON object", where=str(path))
    return parse_case(document, where=str(path))


def parse_case(document: Mapping[str, Any], *, where: str = "case") -> Case:
    """Check a case and lay its ragged lists flat. Raises DataError naming field and index."""
    try:
        given = _Document.model_validate(document)
        _check_lengths(given)
        return _case(given)
    except pydantic.ValidationError as error:
        message, remedy = _explained(error.errors()[0])
    except ValueError as error:
        message, remedy = _with_remedy(error)
    raise DataError(message, where=where, remedy=remedy)


def _explained(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what pydantic found, as place and fault, and perhaps the remedy."""
    place = _place(error["loc"])
    if error["type"] == "value_error":
        what, remedy = _with_remedy(error["ctx"]["error"])
        return f"{place} {what}", remedy
    what = _WORDS.get(error["type"], error["msg"]).format(**error)
    if error["type"] == "extra_forbidden":
        return f"{place} {what}", did_you_mean(place, _Document.model_fields)
    return f"{place} {what}", None


def _with_remedy(error: ValueError) -> tuple[str, str | None]:
    """Return the message of an error of this module, and its remedy if it has one."""
    if len(error.args) > 1:
        return error.args[0], error.args[1]
    return error.args[0], None


def _place(location: Sequence[int | str]) -> str:
    """Name the place in the document, for example `steps[0][1].reward`."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in ("samples", "tokens"):  # kinds of advantages, which nobody wrote
            place += f".{part}"
    return place.removeprefix(".")


def _check_lengths(given: _Document) -> None:
    """Raise ValueError where a list has not one entry per sample, or not one per token."""
    counts = [len(row) for row in given.logprobs]
    for name, values in _per_sample(given):
        if len(values) != len(counts):
            raise ValueError(
                f"{name} has {len(values)} entries, logprobs has {len(counts)}",
                "one entry per sample",
            )
        is_per_token = name in _RAGGED or (name == "advantages" and isinstance(values[0], list))
        if not is_per_token:
            continue
        for i, (row, count) in enumerate(zip(values, counts, strict=True)):
            if len(row) != count:
                raise ValueError(f"{name}[{i}] has {len(row)} tokens, logprobs[{i}] has {count}")


def _per_sample(given: _Document) -> Iterator[tuple[str, list[Any]]]:
    """Yield all lists with one entry per sample, by the name that the document has for them."""
    for name, values in given:
        if isinstance(values, list):
            yield name, values
    for name, values in given.components.items():
        yield f"components.{name}", values


def _case(given: _Document) -> Case:
    size = len(given.logprobs)
    mask = _mask(given)
    columns = _columns(given, mask)
    staleness = columns.pop("staleness", None)
    names, domains = _labels("domains", given.domains, size)
    _, groups = _labels("group_ids", given.group_ids, size)
    _check_domains(groups, domains)
    ids = given.sample_ids or range(size)
    if len(set(ids)) < size:
        raise ValueError("sample_ids are not unique")
    rewards, components, weights = _rewards(given, size)
    correct = None
    if given.correct is not None:
        correct = torch.tensor(given.correct, dtype=torch.bool)
    of_old_policy = dict(columns)
    del of_old_policy["logprobs"]
    of_old_policy["sampled_logprobs"] = columns["old_logprobs"]
    turns = _turns(given, mask)
    batch = SampleBatch(
        rewards=rewards,
        group_ids=groups,
        token_counts=torch.tensor([sum(row) for row in mask]),
        sample_ids=torch.tensor(ids),
        domains=domains,
        trained=torch.ones(size, dtype=torch.bool),
        components=components,
        component_weights=weights,
        correct=correct,
        tokens=of_old_policy,
        events=_steps(given, mask),
        turns=turns,
        spoilt=_spoilt(given, mask, turns),
        dropped=_dropped(given, names),
        staleness=staleness,
    )
    return Case(
        batch=batch,
        domains=names,
        columns=columns,
        mask=mask,
        truncated=torch.tensor(given.truncated or [False] * size, dtype=torch.bool),
        advantages=_given_advantages(given, mask),
        has_rewards=given.rewards is not None or bool(given.components),
        state=_state(given, names),
    )


def _columns(given: _Document, mask: Sequence[Sequence[bool]]) -> dict[str, Tensor]:
    """Return values of policy tokens by name, [n]; what is not given is that of the current
    policy."""
    columns = {}
    for name in ("logprobs", *_RAGGED[:-1]):
        rows = getattr(given, name)
        if not rows:
            continue
        dtype = torch.float64
        if name in ("token_ids", "staleness"):
            dtype = torch.int64
        columns[name] = _flat(rows, mask, dtype)
    columns.setdefault("old_logprobs", columns["logprobs"])
    columns.setdefault("rollout_logprobs", columns["old_logprobs"])
    return columns


def _check_domains(groups: Tensor, domains: Tensor) -> None:
    """Raise ValueError where samples of a group have different domains. Both: int64 [N]."""
    domain_of: dict[int, int] = {}
    for i, (group, domain) in enumerate(zip(groups.tolist(), domains.tolist(), strict=True)):
        if domain_of.setdefault(group, domain) != domain:
            raise ValueError(
                f"domains[{i}] differs from the domain of its group",
                "a group has one prompt, hence one domain",
            )


def _mask(given: _Document) -> list[list[bool]]:
    """Return which of all tokens are policy tokens."""
    if given.loss_mask is None:
        return [[True] * len(row) for row in given.logprobs]
    mask = []
    for row in given.loss_mask:
        mask.append([bool(flag) for flag in row])
    return mask


def _flat(
    rows: Sequence[Sequence[float]], mask: Sequence[Sequence[bool]], dtype: torch.dtype
) -> Tensor:
    """Return the policy tokens of ragged rows, one after another. [n]"""
    return torch.tensor(list(compress(chain(*rows), chain(*mask))), dtype=dtype)


def _given_advantages(given: _Document, mask: Sequence[Sequence[bool]]) -> Advantages | None:
    """Return the advantages that the case itself gives, by sample or by token."""
    rows: Any = given.advantages
    if rows is None:
        return None
    if isinstance(rows[0], list):
        return Advantages(_flat(rows, mask, torch.float64), per_token=True)
    return Advantages(_double(rows), per_token=False)


def _dropped(given: _Document, domains: Sequence[str]) -> DroppedRewards | None:
    """Return rewards of groups that the sampler did not keep."""
    rewards: list[float] = []
    domain_of: list[int] = []
    for domain, values in given.dropped_rewards.items():
        rewards += values
        domain_of += [_domain_number("dropped_rewards", domain, domains)] * len(values)
    if not rewards:
        return None
    return DroppedRewards(_double(rewards), torch.tensor(domain_of))


def _state(given: _Document, domains: Sequence[str]) -> dict[str, Any]:
    """Return what the objective learned from earlier steps: mean rewards of their groups, for the
    scope of every domain and for that of all together."""
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
    for name in given.component_weights:
        if name not in given.components:
            raise ValueError(f"component_weights.{name} belongs to no component")
    components = {}
    weights = {}
    for name, values in given.components.items():
        components[name] = _double(values)
        weights[name] = _double([given.component_weights.get(name, 1.0)] * size)
    if given.rewards is not None:
        return _double(given.rewards), components, weights
    if not components and given.advantages is None:
        raise ValueError("rewards is missing", "give rewards, components or advantages")
    if not components:
        return torch.zeros(size).double(), components, weights
    return _weighted_sum(components, weights), components, weights


def _weighted_sum(components: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """Return the sums of components as `rewards.pool.weighted_sum` has them: NaN where all are NaN
    that weigh something, or all, where none does. Components, weights and sums: float64 [N]."""
    counted = [name for name in components if bool((weights[name] != 0).any())]
    if not counted:
        counted = list(components)
    values = torch.stack([components[name] for name in counted])
    of_values = torch.stack([weights[name] for name in counted])
    total = (torch.nan_to_num(values) * of_values).sum(0)
    return total.masked_fill(torch.isnan(values).all(0), math.nan)


def _labels(
    name: str, values: Sequence[int | str] | None, size: int
) -> tuple[tuple[str, ...], Tensor]:
    """Return names in order of appearance, int64 [N] of indices; numbers are indices themselves."""
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


def _steps(given: _Document, mask: Sequence[Sequence[bool]]) -> Events | None:
    """Return rewards of steps, at policy tokens."""
    if given.steps is not None and given.turns is not None:
        raise ValueError("turns and steps exclude each other")
    if given.steps is None:
        return None
    return _placed("steps", given.steps, mask)


def _spoilt(
    given: _Document, mask: Sequence[Sequence[bool]], turns: Events | None
) -> Tensor | None:
    """Return policy tokens of spoilt turns, bool [n]: those up to its end and behind the turn
    before."""
    if given.turns is None or turns is None:
        return None
    is_spoilt = [bool(turn.spoilt) for turn in chain(*given.turns)]
    if not any(is_spoilt):
        return None
    counts = [sum(row) for row in mask]
    offsets = np.cumsum(counts) - counts
    found = torch.zeros(sum(counts), dtype=torch.bool)
    for place in np.lexsort((turns.end, turns.sample)).tolist():
        sample = int(turns.sample[place])
        before = turns.end[(turns.sample == sample) & (turns.end < turns.end[place])]
        start = 0
        if len(before):
            start = int(before.max()) + 1
        first = int(offsets[sample])
        found[first + start : first + int(turns.end[place]) + 1] = is_spoilt[place]
    return found


def _turns(given: _Document, mask: Sequence[Sequence[bool]]) -> Events | None:
    """Return turns with the environment's rewards and states, at policy tokens."""
    if given.turns is None:
        return None
    events = _placed("turns", given.turns, mask)
    places = set(zip(events.sample.tolist(), events.end.tolist(), strict=True))
    if len(places) < len(events.sample):
        raise ValueError("turns has two turns that end with the same policy token")
    number_of: dict[str | int, int] = {}
    states = []
    for place, turn in enumerate(chain(*given.turns)):
        state: str | int = str(turn.state)
        if turn.state is None:
            state = place  # a text is equal to none of these
        states.append(number_of.setdefault(state, len(number_of)))
    return replace(events, state=torch.tensor(states, dtype=torch.int64))


def _placed(name: str, rows: Sequence[Sequence[_Step]], mask: Sequence[Sequence[bool]]) -> Events:
    """Return steps or turns by sample; where they end is counted in policy tokens. No states.

    Raises ValueError where one ends outside of its sample or before its first policy token."""
    samples = []
    ends = []
    rewards = []
    for i, row in enumerate(rows):
        for k, event in enumerate(row):
            if not 0 <= event.end < len(mask[i]):
                raise ValueError(
                    f"{name}[{i}][{k}] ends at token {event.end} of {len(mask[i])}: end is the "
                    f"number of its last token, from 0 to {len(mask[i]) - 1}"
                )
            num_policy_tokens = sum(mask[i][: event.end + 1])
            if num_policy_tokens == 0:
                raise ValueError(f"{name}[{i}][{k}] has no policy token")
            samples.append(i)
            ends.append(num_policy_tokens - 1)
            rewards.append(event.reward)
    return Events(
        sample=torch.tensor(samples, dtype=torch.int64),
        end=torch.tensor(ends, dtype=torch.int64),
        reward=_double(rewards),
    )
