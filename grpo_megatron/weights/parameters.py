"""Megatron's parameters as Hugging Face tensors: names, shapes, the order of rows.

Which tensors a parameter is made of is in the family's table, under *global* names (layer and
expert numbers of the whole model); how it is split over ranks, the parameter itself knows."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.family import family_of, numbered_pattern
from grpo_megatron.plan.hf_config import unified
from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.tensor_entry import TensorEntry, dtype_name

REWARD_HEAD = "score.weight"
"""The scalar head of a reward model, in Megatron's model and in Hugging Face's checkpoints."""
OUTPUT_LAYER = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
VOCABULARY = (EMBEDDING, OUTPUT_LAYER)
TOWER = "visual."
"""Begins the names of the tensors of a vision tower in Megatron's model."""
CARRIED = "carried."
"""Begins the names of tensors that are kept although Megatron has no parameter for them."""
SELECTION_BIAS = ".expert_bias"
"""Ends the name of the biases by which a router chooses: rounded ones choose other experts."""
ADAPTERS = "adapters."
"""Begins the names of parameters of adapters in a checkpoint; PEFT's names follow."""
_ADAPTERS_IN_MODEL = ".adapters."
VALUE_HEAD = "value_head."
"""Begins the name of the head of a critic on the policy's layers."""
_LAYER = "decoder.layers.{layer}."
_EXPERT = re.compile(r"(\.experts\.)\d+\.")
_KINDS = {
    ".linear_qkv.": "qkv",
    ".linear_fc1.": "gate_up",
    "word_embeddings.": "vocab",
    "output_layer.": "vocab",
}


def is_beside_weights(name: str) -> bool:
    """Whether a parameter of Megatron's model is none of the language model's, but of an adapter or
    of the head of a critic."""
    return _ADAPTERS_IN_MODEL in name or name.startswith(VALUE_HEAD)


_NUM_TENSORS = {"qkv": 3, "gate_up": 2}
_ORDERS = {
    "qkv": "those of q, k and v, in this order",
    "gate_up": "gate, then up",
    "copy": "the one tensor",
    "vocab": "the one tensor",
}
_NUMBERS = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a family's table: a Megatron name, and the Hugging Face tensors it is made of.

    `pattern` fully matches the Megatron name; its groups fill `{layer}`, `{expert}` of `names`.

    Kinds: `copy` 1:1; `qkv` q, k, v interleaved by query group; `gate_up` gate above up;
    `vocab` 1:1 with padded vocabulary rows."""

    parameter: str
    """The Megatron name, as the table has it."""
    pattern: re.Pattern[str]
    names: tuple[str, ...]
    kind: str = "copy"
    file: str = ""
    """Of the table, for messages."""


@cache
def rules_for(model_type: str) -> tuple[Rule, ...]:
    """Return the family's table, every parameter in both spellings: plain layers and fused ones.

    Raises ConfigError for an unknown family, one that Megatron-Core cannot compute, or a row that
    names other tensors than its parameter is made of."""
    family = family_of(model_type)
    file = family.file
    rules = [_rule(file, name, name, tensor) for name, tensor in family.model.items()]
    rules.append(_rule(file, REWARD_HEAD, REWARD_HEAD, REWARD_HEAD))
    of_tower = family.tower_prefix + "{rest}"
    rules.append(Rule(TOWER, re.compile(re.escape(TOWER) + r"(?P<rest>.+)"), (of_tower,)))
    for name, tensors in family.layer.items():
        if isinstance(tensors, str):
            tensors = [tensors]
        hf = [family.layer_prefix + tensor for tensor in tensors]
        rules.append(_rule(file, _LAYER + name, name, *hf))
        for spelling, plain in family.spellings.items():
            if plain == name:
                rules.append(_rule(file, _LAYER + spelling, name, *hf))
    return tuple(rules)


def _rule(file: str, spelling: str, name: str, *tensors: str) -> Rule:
    """Return the rule for a row of the table in `file`: `name` in this spelling is made of
    `tensors`.

    Raises ConfigError for another number of tensors, and for `{...}` in them that the parameter
    does not have."""
    kind = _kind(name)
    wanted = _NUM_TENSORS.get(kind, 1)
    if len(tensors) != wanted:
        raise ConfigError(
            f"{name!r} is made of {wanted} Hugging Face tensor(s), the table names "
            f"{len(tensors)}: {', '.join(tensors)}",
            where=file,
            remedy=f"name {_ORDERS[kind]}",
        )
    numbers = set(_NUMBERS.findall(spelling))
    for tensor in tensors:
        for number in _NUMBERS.findall(tensor):
            if number not in numbers:
                raise ConfigError(
                    f"{tensor!r} has {{{number}}}, which {name!r} has not",
                    where=file,
                    remedy=did_you_mean(number, sorted(numbers)),
                )
    return Rule(spelling, numbered_pattern(spelling), tensors, kind, file)


def _kind(name: str) -> str:
    for part, kind in _KINDS.items():
        if part in name:
            return kind
    return "copy"


def resolve(rules: tuple[Rule, ...], name: str) -> tuple[str, list[str]]:
    """Return kind and Hugging Face names of a global Megatron name.

    Raises ConfigError when no rule matches."""
    for rule in rules:
        match = rule.pattern.fullmatch(name)
        if match is not None:
            numbers = match.groupdict()
            return rule.kind, [template.format(**numbers) for template in rule.names]
    near = nearest(name, [rule.parameter for rule in rules], count=1, cutoff=0.75)
    remedy = "add it to [model] or [layer]"
    if near:
        remedy += f", or correct {near[0].removeprefix(_LAYER)!r} there"
    raise ConfigError(
        f"no Hugging Face name for Megatron parameter {name!r}",
        where=rules[0].file,
        remedy=f"{remedy}; plan/families/parts/base.toml explains the tables",
    )


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A part of a Hugging Face tensor that is on this rank: `box` of its full `shape`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of the whole model, made of the rows of Hugging Face tensors.

    Those lie one tensor above the next; with `groups` the first part of each tensor comes first,
    then the second of each, and so on. Rows that are left over are padding of the vocabulary."""

    name: str
    shape: tuple[int, ...]
    hf: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    groups: int = 1

    def entries(self, dtype: torch.dtype) -> list[TensorEntry]:
        """Describe its Hugging Face tensors for a file."""
        return [TensorEntry(name, dtype_name(dtype), shape) for name, shape in self.hf]

    def merge(self, tensors: Sequence[torch.Tensor], parts: int = 1) -> torch.Tensor:
        """Make Megatron's tensor of `tensors`, one for each of `hf` in that order. With `parts`,
        each tensor is the same one of `parts` equal slices of its rows, and so is the result."""
        if len(tensors) == 1:
            return tensors[0]
        groups = max(self.groups // parts, 1)
        grouped = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Invert `merge`: the Hugging Face tensors of the full parameter, without padding rows.

        They are views of `full`, but where rows are interleaved."""
        return self._split_rows(full, num_parts=1)

    def _split_rows(self, part: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
        """Return the rows of each Hugging Face tensor in one of `num_parts` equal slices of the
        parameter's rows, without padding; they are views, but where rows are interleaved."""
        groups = max(self.groups // num_parts, 1)
        grouped = part.view(groups, -1, *part.shape[1:])
        tensors = []
        start = 0
        for _, shape in self.hf:
            rows = shape[0] // num_parts // groups
            tensors.append(grouped.narrow(1, start, rows).flatten(0, 1))
            start += rows
        return tensors

    def held_by(
        self, part: torch.Tensor, dim: int | None = None, size: int = 1, rank: int = 0
    ) -> list["HeldTensor"]:
        """Say which parts of its Hugging Face tensors a tensor-parallel part of it is.

        part: number `rank` of `size` equal ones along `dim`; None: the whole parameter. Padding of
        the vocabulary is left out, and with it what is nothing but padding. ValueError: a group of
        query heads is spread over several parts, so that keys and values are no rows of one."""
        if size > self.groups > 1 and dim == 0:
            raise ValueError(
                f"{self.name!r} has {self.groups} query groups, which {size} parts cannot share"
            )
        tensors = self.local_tensors(part, dim, size)
        held = []
        for (name, shape), tensor in zip(self.hf, tensors, strict=True):
            start = [0] * len(shape)
            if dim is not None:
                start[dim] = rank * tensor.shape[dim]
            if len(shape) > 0:
                rows = min(tensor.shape[0], shape[0] - start[0])  # what is more is padding
                if rows <= 0:
                    continue
                tensor = tensor[:rows]
            held.append(HeldTensor(name, shape, Box(tuple(start), tuple(tensor.shape)), tensor))
        return held

    def local_tensors(
        self, part: torch.Tensor, dim: int | None = None, size: int = 1
    ) -> list[torch.Tensor]:
        """Return the rows of each Hugging Face tensor in a part, as `held_by` takes it; they are
        views, but where rows are interleaved."""
        if len(self.hf) == 1:
            return [part]
        num_parts = 1
        if dim == 0:
            num_parts = size
        return self._split_rows(part, num_parts)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put the full parameter together of its tensor-parallel parts along `dim`, by rank.

        A part of gate and up holds a slice of both; in the result all slices of gate come first,
        then those of up."""
        if dim != 0 or self.groups != 1:
            return torch.cat(list(parts), dim)
        slices = [part.chunk(len(self.hf)) for part in parts]  # gate and up have equal rows
        ordered: list[torch.Tensor] = []
        for slices_of_tensor in zip(*slices, strict=True):
            ordered += slices_of_tensor
        return torch.cat(ordered, dim)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What the parameters of one model are in Hugging Face's checkpoints.

    `num_query_groups` heads of keys and values serve `num_heads` of queries, each `head_dim`
    wide; `vocab_size` is without padding."""

    rules: tuple[Rule, ...]
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool

    def parameter(self, name: str, shape: tuple[int, ...]) -> Parameter:
        """Find the Hugging Face tensors of a global Megatron name with its full shape.

        Raises ConfigError when no rule matches."""
        if self.tied_embeddings and name == OUTPUT_LAYER:
            name = EMBEDDING
        kind, names = resolve(self.rules, name)
        groups = 1
        if kind == "qkv":
            groups = self.num_query_groups
        hf = []
        for hf_name, num_rows in zip(names, self._rows(kind, shape[0]), strict=True):
            hf.append((hf_name, (num_rows, *shape[1:])))
        return Parameter(name, shape, tuple(hf), groups)

    def _rows(self, kind: str, num_rows: int) -> list[int]:
        """Return the rows of each Hugging Face tensor in a parameter of `num_rows`."""
        if kind == "qkv":
            query_rows = self.num_heads * self.head_dim
            key_rows = self.num_query_groups * self.head_dim
            return [query_rows, key_rows, key_rows]
        if kind == "vocab":
            return [self.vocab_size]
        if kind == "gate_up":
            return [num_rows // 2, num_rows // 2]
        return [num_rows]


def without_expert(module: str) -> str:
    """Name what experts of a layer share: `mlp.experts.3.down_proj` is `mlp.experts.down_proj`."""
    return _EXPERT.sub(r"\1", module)


def carried_names(hf: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the tensors among `names` that belong to a checkpoint, but to no parameter here.

    Multi-token-prediction layers (after the last layer) are not trained by an RL objective, and
    rotary frequencies are computed: export may carry both along unchanged, or drop them."""
    fields = unified(hf)
    first = fields["num_hidden_layers"]
    extra = range(first, first + (fields.get("num_nextn_predict_layers") or 0))
    prefix = family_of(hf["model_type"]).layer_prefix
    of_layer = re.compile(re.escape(prefix).replace(r"\{layer\}", r"(\d+)"))
    found = set()
    for name in names:
        layer = of_layer.match(name)
        if layer is None:
            continue
        if int(layer[1]) in extra or name.endswith(".rotary_emb.inv_freq"):
            found.add(name)
    return found


def names_with_own_dtype(hf: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the tensors among `names`, of a checkpoint with the config.json `hf`, that keep their
    dtype where the others get a wanted one: the biases by which routers choose, and what is
    carried. Raises ConfigError for a family that is not computed."""
    names = list(names)
    found = carried_names(hf, names)
    for rule in rules_for(hf["model_type"]):
        if not rule.parameter.endswith(SELECTION_BIAS):
            continue
        for tensor in rule.names:
            pattern = numbered_pattern(tensor)
            found.update(name for name in names if pattern.fullmatch(name))
    return found


def carried_parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    """Make a parameter of a Hugging Face tensor that Megatron has none for."""
    return Parameter(CARRIED + name, shape, ((name, shape),))


def num_elements(parameters: Sequence[Parameter]) -> int:
    """Count the numbers in all `parameters`, padding of the vocabulary included."""
    total = 0
    for parameter in parameters:
        total += math.prod(parameter.shape)
    return total
