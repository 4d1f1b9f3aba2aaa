"""Experts of a layer in one tensor of a checkpoint's files, as some families have them.

    in files    mlp.experts.gate_up_proj               [experts, inputs, outputs of gate and of up]
    elsewhere   mlp.experts.{expert}.gate_proj.weight  [outputs, inputs]
                mlp.experts.{expert}.up_proj.weight    [outputs, inputs]

Trainer, engines, digests and messages have the matrices of each expert by their own names, as of
any other family. Only files are read and written through this (`[stacked]` of its table).

Released checkpoints turn the matrices, as above, and vLLM turns them back. transformers 5 turns
those that would not fit otherwise, and saves them unturned: files come either way, and what fits
both ways is unturned. So is what is written if it is square; else it is turned, which both of them
read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.checkpoints.durable import explained
from grpo_megatron.plan.family import family_names, family_of
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

    def is_turned(self, stack_shape: Sequence[int]) -> bool:
        """Say whether a stack of this shape has [inputs, outputs] of an expert."""
        return stack_shape[2] != self.num_inputs

    def matrix_shape(self, stack_shape: Sequence[int]) -> Shape:
        """Return the matrix's shape by that of the stack."""
        _, inputs, outputs = stack_shape
        if not self.is_turned(stack_shape):
            outputs, inputs = inputs, outputs
        return outputs // self.count, inputs

    def stack_shape(self, num_experts: int, matrix_shape: Sequence[int]) -> Shape:
        """Return the shape of the stack that is written."""
        outputs, inputs = matrix_shape
        turned = (num_experts, inputs, outputs * self.count)
        if self.is_turned(turned):
            return turned
        return num_experts, outputs * self.count, inputs

    def block(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what is written of one expert, by all its matrices in the stack, in order."""
        shape = self.stack_shape(1, matrices[0].shape)
        if self.is_turned(shape):
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
            match = _pattern(matrix).fullmatch(name)
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
            match = _pattern(rule.stack).fullmatch(stack)
            if match is None:
                continue
            names = []
            for expert in range(num_experts):
                for matrix in rule.matrices:
                    names.append(matrix.format(layer=match["layer"], expert=expert))
            return names
        return []

    def in_files(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Return the tensors of a file by those in it, of which it has all of a stack's."""
        found: dict[str, TensorEntry] = {}
        for entry in entries:
            member = self.member(entry.name)
            if member is None:
                found[entry.name] = entry
                continue
            num_experts = member.expert + 1
            if member.stack in found:
                num_experts = max(num_experts, found[member.stack].shape[0])
            shape = member.stack_shape(num_experts, entry.shape)
            found[member.stack] = TensorEntry(member.stack, entry.dtype, shape)
        return list(found.values())

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
    """Return the stacks in checkpoints of a model, by its config.json; none of a family that is not
    known."""
    if hf.get("model_type") not in family_names():
        return NO_STACKS
    family = family_of(hf["model_type"])
    fields = unified(hf)
    rules = []
    for name, stacked in family.stacked.items():
        matrices = tuple(family.layer_prefix + matrix for matrix in stacked.matrices)
        rules.append(_Rule(family.layer_prefix + name, matrices, fields[stacked.inputs]))
    return Stacks(rules, family.layer_prefix)


def stacks_in(directory: Path) -> Stacks:
    """Return the stacks of a checkpoint; none of one without config.json. Raises CheckpointError
    where that is damaged."""
    file = directory / "config.json"
    if not file.exists():
        return NO_STACKS
    with explained("unreadable config.json", directory):
        hf = json.loads(file.read_text(encoding="utf-8"))
    return stacks_of(hf)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(name)))
