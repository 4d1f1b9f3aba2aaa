"""Megatron's parameters as Hugging Face tensors: names, shapes, the order of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from grpo_megatron.weights.rules import Rule, resolve
from grpo_megatron.weights.transfer_plan import TensorEntry

OUTPUT_LAYER, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
VOCABULARY = (EMBEDDING, OUTPUT_LAYER)
CARRIED = "carried."
"""Begins the names of tensors that are kept although Megatron has no parameter for them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of the whole model, made of the rows of Hugging Face tensors.

    Those lie one tensor above the next; with `groups` the first part of each tensor comes first,
    then the second of each, and so on. Rows that are left over are padding of the vocabulary."""

    name: str
    shape: tuple[int, ...]
    hf: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    groups: int = 1

    def entries(self, dtype: torch.dtype, sender: int = 0) -> list[TensorEntry]:
        text = str(dtype).removeprefix("torch.")
        return [TensorEntry(name, text, shape, sender) for name, shape in self.hf]

    def merge(self, tensors: Sequence[torch.Tensor], parts: int = 1) -> torch.Tensor:
        """The parameter; of equal `parts` of all tensors, that part of it."""
        if len(tensors) == 1:
            return tensors[0]
        groups = max(self.groups // parts, 1)
        return torch.cat([t.reshape(groups, -1, *t.shape[1:]) for t in tensors], 1).flatten(0, 1)

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Inverse of `merge`; views, but where rows are interleaved."""
        grouped = full.view(self.groups, -1, *full.shape[1:])
        rows = [shape[0] // self.groups for _, shape in self.hf]
        parts = grouped.split([*rows, grouped.size(1) - sum(rows)], 1)
        return [part.flatten(0, 1) for part in parts[: len(rows)]]

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The parameter of its tensor-parallel parts, which have a part of each tensor."""
        if dim == 0 and self.groups == 1:
            halves = [part.chunk(len(self.hf)) for part in parts]  # gate and up are alike
            parts = list(chain.from_iterable(zip(*halves, strict=True)))
        return torch.cat(list(parts), dim)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What the parameters of one model are in Hugging Face's checkpoints."""

    rules: tuple[Rule, ...]
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool

    def parameter(self, name: str, shape: tuple[int, ...]) -> Parameter:
        """Of a global Megatron name and full shape. KeyError when no rule matches."""
        if self.tied_embeddings and name == OUTPUT_LAYER:
            name = EMBEDDING
        kind, names = resolve(self.rules, name)
        heads = (self.num_heads, self.num_query_groups, self.num_query_groups)
        rows = {"qkv": [count * self.head_dim for count in heads], "vocab": [self.vocab_size],
                "gate_up": [shape[0] // 2] * 2}.get(kind, [shape[0]])
        hf = tuple((n, (count, *shape[1:])) for n, count in zip(names, rows, strict=True))
        return Parameter(name, shape, hf, self.num_query_groups if kind == "qkv" else 1)


def carried_parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    """Of a Hugging Face tensor that Megatron has no parameter for."""
    return Parameter(CARRIED + name, shape, ((name, shape),))


def num_elements(parameters: Sequence[Parameter]) -> int:
    return sum(torch.Size(parameter.shape).numel() for parameter in parameters)
