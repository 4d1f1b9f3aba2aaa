"""Experts of a layer in one tensor of a checkpoint's files, as some families have them.

    in files    mlp.experts.gate_up_proj               [experts, inputs, outputs of gate and of up]
    elsewhere   mlp.experts.{expert}.gate_proj.weight  [outputs, inputs]
                mlp.experts.{expert}.up_proj.weight    [outputs, inputs]

Trainer, engines, digests and messages have the matrices of each expert by their own names, as of
any other family. Only files are read and written through this (`[stacked]` of its table).

Released checkpoints transpose the matrices, as above, and vLLM transposes them back. transformers 5
transposes those that would not fit otherwise, and saves them as they are: files come either way,
and what fits both ways is taken as it is. So is what is written if it is square, which vLLM then
misreads (rule `stacked_files`); everything else is written transposed, which both of them read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.checkpoints.durable import explained
from grpo_megatron.errors import CheckpointError, ConfigError
from grpo_megatron.plan.family import family_names, family_of, numbered_pattern, tables_of
from grpo_megatron.plan.hf_config import unified
from grpo_megatron.weights.tensor_entry import TensorEntry

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A matrix of one expert, in a stack."""

    stack: str
    """The tensor in files."""
    layer: str
    """Begins the names of all stacks of the layer."""
    expert: int
    place: int
    """Among the matrices of an expert in this stack, of which there are `count`."""
    count: int
    num_inputs: int

    def is_transposed(self, stack_shape: Sequence[int]) -> bool:
        """Say whether a stack of this shape has [inputs, outputs] of an expert."""
        return stack_shape[2] != self.num_inputs

    def can_be_in(self, stack_shape: Sequence[int]) -> bool:
        """Say whether a stack of this shape has such matrices, in either order."""
        if len(stack_shape) != 3 or self.num_inputs not in stack_shape[1:]:
            return False
        num_outputs = stack_shape[1]
        if self.is_transposed(stack_shape):
            num_outputs = stack_shape[2]
        return num_outputs % self.count == 0

    def matrix_shape(self, stack_shape: Sequence[int]) -> Shape:
        """Return the matrix's shape by that of a stack which it can be in."""
        _, num_outputs, num_inputs = stack_shape
        if self.is_transposed(stack_shape):
            num_outputs, num_inputs = num_inputs, num_outputs
        return num_outputs // self.count, num_inputs

    def stack_shape(self, num_experts: int, matrix_shape: Sequence[int]) -> Shape:
        """Return the shape of the stack that is written."""
        num_outputs, num_inputs = matrix_shape
        transposed = (num_experts, num_inputs, num_outputs * self.count)
        if self.is_transposed(transposed):
            return transposed
        return num_experts, num_outputs * self.count, num_inputs

    def block(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what is written of one expert, by all its matrices in the stack, in order."""
        shape = self.stack_shape(1, matrices[0].shape)
        if self.is_transposed(shape):
            return torch.cat([matrix.T for matrix in matrices], 1)
        return torch.cat(list(matrices), 0)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A row of a family's `[stacked]`, with whole names."""

    stack: str
    matrices: tuple[str, ...]
    num_inputs: int

    def member(self, name: str, layer_prefix: str) -> Member | None:
        """Say where a matrix is in the stack, if it is."""
        for place, matrix in enumerate(self.matrices):
            match = numbered_pattern(matrix).fullmatch(name)
            if match is not None:
                return Member(
                    stack=self.stack.format(layer=match["layer"]),
                    layer=layer_prefix.format(layer=match["layer"]),
                    expert=int(match["expert"]),
                    place=place,
                    count=len(self.matrices),
                    num_inputs=self.num_inputs,
                )
        return None


class Stacks:
    """Which tensors of a family's files are stacks, and of what."""

    def __init__(self, rules: Sequence[_Rule] = (), layer_prefix: str = ""):
        self._rules = rules
        self._layer_prefix = layer_prefix

    def member(self, name: str) -> Member | None:
        """Say where a matrix is in files; None for a tensor that is there under its own name."""
        for rule in self._rules:
            member = rule.member(name, self._layer_prefix)
            if member is not None:
                return member
        return None

    def has(self, name: str) -> bool:
        """Say whether a tensor of a file is a stack."""
        return bool(self.matrices(name, 1))

    def matrices(self, stack: str, num_experts: int) -> list[str]:
        """Name the matrices in a tensor of a file, expert by expert; none in one that is no
        stack."""
        for rule in self._rules:
            match = numbered_pattern(rule.stack).fullmatch(stack)
            if match is None:
                continue
            names = []
            for expert in range(num_experts):
                for matrix in rule.matrices:
                    names.append(matrix.format(layer=match["layer"], expert=expert))
            return names
        return []

    def in_files(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Return the tensors of a file by those in it. Raises CheckpointError where a stack would
        lack one of its matrices, or have some of another type or shape."""
        found: dict[str, TensorEntry] = {}
        of_stacks: dict[str, list[tuple[Member, TensorEntry]]] = {}
        for entry in entries:
            member = self.member(entry.name)
            if member is None:
                found[entry.name] = entry
            else:
                of_stacks.setdefault(member.stack, []).append((member, entry))
        for stack, members in of_stacks.items():
            found[stack] = self._stack_of(stack, members)
        return list(found.values())

    def _stack_of(self, stack: str, members: Sequence[tuple[Member, TensorEntry]]) -> TensorEntry:
        """Return the tensor that matrices are written in."""
        num_experts = 1 + max(member.expert for member, _ in members)
        found = {entry.name for _, entry in members}
        missing = [name for name in self.matrices(stack, num_experts) if name not in found]
        if missing:
            raise CheckpointError(
                f"{stack!r} would lack {len(missing)} of its matrices, for example {missing[0]!r}",
                remedy="look for them in the source",
            )
        first, like = members[0]
        for _, entry in members:
            if (entry.dtype, entry.shape) != (like.dtype, like.shape):
                raise CheckpointError(
                    f"{stack!r} would hold {like.name!r}, {like.dtype} {like.shape}, and "
                    f"{entry.name!r}, {entry.dtype} {entry.shape}",
                    remedy="make their types equal with --dtype",
                )
        return TensorEntry(stack, like.dtype, first.stack_shape(num_experts, like.shape))

    def bundles(self, units: Sequence[Sequence[TensorEntry]]) -> list[list[int]]:
        """Return the numbers of units that must be in one file: those with experts of one layer."""
        found: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            key = unit[0].name
            member = self.member(key)
            if member is not None:
                key = member.layer
            found.setdefault(key, []).append(number)
        return list(found.values())


NO_STACKS = Stacks()


def stacks_of(hf: Mapping[str, Any]) -> Stacks:
    """Return the stacks in checkpoints of a model, by its config.json; none of a family that has
    none, or is not known. Raises ConfigError where a size of them is missing."""
    model_type = hf.get("model_type")
    if model_type not in family_names():
        return NO_STACKS
    # also of a family that is refused elsewhere: its files can be read
    if "stacked" not in tables_of(model_type):
        return NO_STACKS
    family = family_of(model_type)
    fields = unified(hf)
    rules = []
    for name, stacked in family.stacked.items():
        num_inputs = fields.get(stacked.inputs)
        if num_inputs is None:
            raise ConfigError(f"{stacked.inputs} is missing in the configuration of {model_type}")
        matrices = tuple(family.layer_prefix + matrix for matrix in stacked.matrices)
        rules.append(_Rule(family.layer_prefix + name, matrices, num_inputs))
    return Stacks(rules, family.layer_prefix)


def stacks_in(directory: Path) -> Stacks:
    """Return the stacks of a checkpoint; none of one without config.json. Raises CheckpointError
    where that is damaged, ConfigError as of `stacks_of`."""
    file = directory / "config.json"
    if not file.exists():
        return NO_STACKS
    with explained("unreadable config.json", directory):
        hf = dict(json.loads(file.read_text(encoding="utf-8-sig")))
    return stacks_of(hf)
