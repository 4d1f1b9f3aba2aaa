"""CASE.json: a small batch by hand, for `grpo-megatron objective eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages import Advantages
from grpo_megatron.algorithms.batch import Events, SampleBatch
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import DataError

_TOKEN_FIELDS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies", "token_ids",
                 "loss_mask")
_SAMPLE_FIELDS = ("rewards", "advantages", "group_ids", "domains", "truncated", "sample_ids",
                  "steps", "turns")
_OTHER_FIELDS = ("logprobs", "components", "component_weights")
_LARGEST = 1e150  # squares stay finite


@dataclass(frozen=True)
class Case:
    """A checked case; token columns hold policy tokens only."""

    batch: SampleBatch
    domains: tuple[str, ...]
    columns: Mapping[str, Tensor]  # [n] float64: logprobs, old_, rollout_, ref_logprobs, entropies
    mask: tuple[tuple[bool, ...], ...]  # of all tokens
    truncated: Tensor  # bool [N]
    advantages: Advantages | None  # given instead of rewards


def read_case(path: Path) -> Case:
    """Raises DataError naming file, field and index."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the case: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise DataError(f"the case is not JSON: {error}", where=str(path)) from None
    if not isinstance(document, dict):
        raise DataError("a case is a JSON object", where=str(path))
    return parse_case(document, where=str(path))


def parse_case(document: Mapping[str, Any], *, where: str = "case") -> Case:
    """Check a case and lay its ragged lists flat."""
    reader = _Reader(document, where)
    logprobs = reader.ragged("logprobs")
    counts = [len(row) for row in logprobs]
    tokens = {name: reader.ragged(name, counts) for name in _TOKEN_FIELDS if name in document}
    mask = tuple(tuple(bool(m) for m in row)
                 for row in tokens.pop("loss_mask", [[1] * n for n in counts]))
    columns = {"logprobs": logprobs, **tokens}

    def flat(name: str) -> Tensor:
        kept = [v for row, marks in zip(columns[name], mask, strict=True)
                for v, m in zip(row, marks, strict=True) if m]
        return torch.tensor(kept, dtype=torch.int64 if name == "token_ids" else torch.float64)

    flats = {name: flat(name) for name in columns}
    flats.setdefault("old_logprobs", flats["logprobs"])
    flats.setdefault("rollout_logprobs", flats["old_logprobs"])
    names, domains = reader.labels("domains", len(counts))
    _, groups = reader.labels("group_ids", len(counts))
    _same_domain(reader, groups, domains)
    components, weights = reader.components(len(counts))
    batch = SampleBatch(
        rewards=_rewards(reader, components, weights, len(counts)), group_ids=groups,
        token_counts=torch.tensor([sum(m) for m in mask]),
        sample_ids=reader.sample_ids(len(counts)), domains=domains,
        trained=torch.ones(len(counts), dtype=torch.bool), components=components,
        component_weights=weights,
        tokens={n: c for n, c in flats.items() if n not in ("logprobs", "rollout_logprobs")},
        events=reader.events(mask))
    truncated = document.get("truncated", [False] * len(counts))
    reader.length("truncated", truncated, len(counts))
    for i, value in enumerate(truncated):
        reader.flag(f"truncated[{i}]", value)
    return Case(batch, names, flats, mask, torch.tensor(truncated).bool(),
                reader.advantages(mask))


def _rewards(reader: _Reader, components: Mapping[str, Tensor], weights: Mapping[str, Tensor],
             count: int) -> Tensor:
    document = reader.document
    if "rewards" in document:
        return reader.numbers("rewards", document["rewards"], count)
    if components:
        return sum(torch.nan_to_num(components[n]) * weights[n] for n in components)
    if "advantages" not in document:
        reader.fail("rewards", "is missing", "give rewards, components or advantages")
    return torch.zeros(count, dtype=torch.float64)


def _same_domain(reader: _Reader, groups: Tensor, domains: Tensor) -> None:
    first: dict[int, int] = {}
    for i, (group, domain) in enumerate(zip(groups.tolist(), domains.tolist(), strict=True)):
        if first.setdefault(group, domain) != domain:
            reader.fail(f"domains[{i}]", "differs from the domain of its group",
                        "a group has one prompt, hence one domain")


class _Reader:
    """Fields of the document, with errors that say where."""

    def __init__(self, document: Mapping[str, Any], where: str):
        self.document, self.where = document, where
        known = (*_SAMPLE_FIELDS, *_TOKEN_FIELDS, *_OTHER_FIELDS)
        for name in document:
            if name not in known:
                close = nearest(name, list(known))
                self.fail(name, "is no field of a case",
                          f"did you mean {close[0]}?" if close else f"fields: {', '.join(known)}")

    def fail(self, place: str, what: str, remedy: str | None = None):
        raise DataError(f"{place} {what}", where=self.where, remedy=remedy)

    def length(self, name: str, values: Any, count: int) -> None:
        if not isinstance(values, list):
            self.fail(name, "is not a list")
        if len(values) != count:
            self.fail(name, f"has {len(values)} entries, logprobs has {count}",
                      "one entry per sample")

    def number(self, place: str, value: Any, *, nan: bool = False,
               infinite: bool = False) -> float:
        if value is None and nan:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(place, f"is {value!r}, not a number")
        if value != value and not nan:
            self.fail(place, "is NaN", "null and NaN are for rewards (unscorable) only")
        endless = value in (math.inf, -math.inf)
        if abs(value) > _LARGEST and not (endless and infinite):
            self.fail(place, "is infinite" if endless else "is too large")
        return float(value)

    def whole(self, place: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 2**31:
            self.fail(place, f"is {value!r}, not a whole number of at least 0 (32 bit)")
        return value

    def flag(self, place: str, value: Any) -> None:
        if value not in (0, 1):
            self.fail(place, f"is {value!r}, not 0 or 1")

    def numbers(self, name: str, values: Any, count: int) -> Tensor:
        self.length(name, values, count)
        found = [self.number(f"{name}[{i}]", v, nan=True) for i, v in enumerate(values)]
        return torch.tensor(found, dtype=torch.float64)

    def components(self, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values and weights by component, float64 [N] each."""
        values, weights = (self.document.get(name, {}) for name in (
            "components", "component_weights"))
        for name, table in (("components", values), ("component_weights", weights)):
            if not isinstance(table, dict):
                self.fail(name, "is not an object", "give names with their values")
        for name in weights:
            if name not in values:
                self.fail(f"component_weights.{name}", "belongs to no component")
        return ({n: self.numbers(f"components.{n}", v, count) for n, v in values.items()},
                {n: torch.full((count,), self.number(f"component_weights.{n}",
                                                     weights.get(n, 1.0)), dtype=torch.float64)
                 for n in values})

    def ragged(self, name: str, counts: Sequence[int] | None = None) -> list[list[float]]:
        rows = self.document.get(name)
        if not isinstance(rows, list) or not rows:
            self.fail(name, "is missing" if rows is None else "has no samples",
                      "give one list per sample")
        if counts is not None:
            self.length(name, rows, len(counts))
        for i, row in enumerate(rows):
            if not isinstance(row, list):
                self.fail(f"{name}[{i}]", "is not a list")
            if counts is not None and len(row) != counts[i]:
                self.fail(f"{name}[{i}]", f"has {len(row)} tokens, logprobs[{i}] has {counts[i]}")
        def entry(place: str, value: Any) -> float:
            if name == "loss_mask":
                self.flag(place, value)
                return float(value)
            if name == "token_ids":
                return self.whole(place, value)
            return self.number(place, value, infinite=name.endswith("logprobs"))

        return [[entry(f"{name}[{i}][{t}]", v) for t, v in enumerate(row)]
                for i, row in enumerate(rows)]

    def advantages(self, mask: Sequence[Sequence[bool]]) -> Advantages | None:
        """One number per sample, or a list per sample where they differ within samples."""
        rows = self.document.get("advantages")
        if rows is None:
            return None
        self.length("advantages", rows, len(mask))
        if not any(isinstance(row, list) for row in rows):
            found = [self.number(f"advantages[{i}]", row) for i, row in enumerate(rows)]
            return Advantages(torch.tensor(found, dtype=torch.float64), per_token=False)
        rows = self.ragged("advantages", [len(marks) for marks in mask])
        kept = [v for row, marks in zip(rows, mask, strict=True)
                for v, m in zip(row, marks, strict=True) if m]
        return Advantages(torch.tensor(kept, dtype=torch.float64), per_token=True)

    def labels(self, name: str, count: int) -> tuple[tuple[str, ...], Tensor]:
        """Names in order of appearance, int64 [N] of indices; numbers are indices themselves."""
        values = self.document.get(name)
        if values is None:
            return ("all",), torch.zeros(count, dtype=torch.int64)
        self.length(name, values, count)
        for i, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | str):
                self.fail(f"{name}[{i}]", f"is {value!r}, not a name or a whole number")
        if all(isinstance(v, int) for v in values):
            empty = sorted(set(range(max(values) + 1)) - set(values))
            if min(values) < 0:
                self.fail(f"{name}[{values.index(min(values))}]", "is negative")
            if empty:
                self.fail(name, f"leaves {empty[0]} empty", "number from 0 without gaps")
            return tuple(map(str, range(max(values) + 1))), torch.tensor(values)
        names = tuple(dict.fromkeys(map(str, values)))
        return names, torch.tensor([names.index(str(v)) for v in values])

    def sample_ids(self, count: int) -> Tensor:
        values = self.document.get("sample_ids", list(range(count)))
        self.length("sample_ids", values, count)
        if len({self.whole(f"sample_ids[{i}]", v) for i, v in enumerate(values)}) < count:
            self.fail("sample_ids", "are not unique")
        return torch.tensor(values, dtype=torch.int64)

    def events(self, mask: Sequence[Sequence[bool]]) -> Events | None:
        """`steps`: [[end, reward], …] per sample; `turns`: [{"end", "reward", "state"}, …]."""
        name = "steps" if "steps" in self.document else "turns"
        rows = self.document.get(name)
        if rows is None:
            return None
        if name == "steps" and "turns" in self.document:
            self.fail("turns", "and steps exclude each other")
        self.length(name, rows, len(mask))
        keys = ("end", "reward", "state") if name == "turns" else ("end", "reward")
        found: list[tuple[int, int, float, str]] = []
        for i, row in enumerate(rows):
            if not isinstance(row, list):
                self.fail(f"{name}[{i}]", "is not a list")
            found += [self._event(f"{name}[{i}][{k}]", keys, item, i, mask[i])
                      for k, item in enumerate(row)]
        if name == "turns" and len({event[:2] for event in found}) < len(found):
            self.fail(name, "has two turns that end with the same policy token")
        sample, end, reward, state = zip(*found, strict=True) if found else ((), (), (), ())
        states = {s: number for number, s in enumerate(dict.fromkeys(state))}
        return Events(torch.tensor(sample, dtype=torch.int64),
                      torch.tensor(end, dtype=torch.int64),
                      torch.tensor(reward, dtype=torch.float64),
                      torch.tensor([states[s] for s in state], dtype=torch.int64)
                      if name == "turns" else None)

    def _event(self, place: str, keys: Sequence[str], item: Any, sample: int,
               mask: Sequence[bool]) -> tuple[int, int, float, str]:
        if isinstance(item, dict):
            item = [item.get(key) for key in keys]
        if not isinstance(item, list) or len(item) != len(keys) or type(item[0]) is not int:
            self.fail(place, f"is not {', '.join(keys)}")
        if not 0 <= item[0] < len(mask):
            self.fail(place, f"ends at token {item[0]} of {len(mask)}")
        policy_tokens = sum(mask[:item[0] + 1])
        if not policy_tokens:
            self.fail(place, "has no policy token")
        return (sample, policy_tokens - 1, self.number(f"{place}.reward", item[1]),
                str(item[-1]))
