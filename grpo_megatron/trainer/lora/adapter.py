"""The adapter of one linear layer, at any layout of ranks.

    base layer      split of its weight    A [rank, in]         B [out, rank], magnitude [out]
    column-parallel by rows (out)          whole on each rank   by rows
    row-parallel    by columns (in)        by columns           whole on each rank
    not split                              whole                whole

What a rank computes with the part that it has of A or B is brought together between the two
products, where it is only `rank` wide.

With DoRA (arXiv:2402.09353) the layer's weight is `magnitude * V / ||V||`, by rows, of
`V = W + scale B A`. The norms are constants of the gradient, as in the paper (4.3) and in PEFT."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from grpo_megatron.weights.gather import Shard
from grpo_megatron.weights.low_rank import low_rank_product

_ATTRIBUTES = (
    ("lora_A", 1, ".weight"),
    ("lora_B", 0, ".weight"),
    ("lora_magnitude_vector", 0, ""),
)
"""Of each parameter: its name, the dimension that may be split, what its name ends with in PEFT's
files."""


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share a linear layer.

    dim: 0, its weight is split by rows over `group`; 1, by columns; None: each rank has all of it.
    is_expert: of a routed expert, whose tokens the dispatcher brings and takes away."""

    dim: int | None
    group: dist.ProcessGroup
    sequence_parallel: bool
    is_expert: bool = False

    @property
    def size(self) -> int:
        """Ranks that share the weight."""
        if self.dim is None:
            return 1
        return self.group.size()


class Adapter(torch.nn.Module):
    """Computes `scale B A x` for the linear layer `module`, a name of Hugging Face's, and with DoRA
    what each of its outputs is multiplied by.

    B begins as zero, A as PEFT has it, uniform within 1 / sqrt(in): the same numbers at every
    layout, by `seed` and name. With `shared`, all experts of a layer have this one between them,
    on all ranks."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    lora_magnitude_vector: torch.nn.Parameter | None
    """Of DoRA; ones until `begin_magnitude`."""

    def __init__(
        self,
        module: str,
        shape: tuple[int, int],
        split: Split,
        rank: int,
        scale: float,
        like: torch.Tensor,
        seed: int,
        *,
        shared: bool = False,
        dora: bool = False,
    ):
        """Make the parts of this rank. shape: (out, in) of the whole layer; like: a weight whose
        dtype and device they have."""
        super().__init__()
        self.module = module
        self.split = split
        self.scale = scale
        self.shared = shared
        num_outputs, num_inputs = shape
        whole = _uniform(f"{seed}/{module}", rank, num_inputs)
        part_a = self._part(whole, 1)
        part_b = self._part(torch.zeros(num_outputs, rank), 0)
        self.lora_A = self._parameter(part_a, like, is_split=split.dim == 1)
        self.lora_B = self._parameter(part_b, like, is_split=split.dim == 0)
        self.lora_magnitude_vector = None
        if dora:
            magnitude = self._part(torch.ones(num_outputs), 0)
            self.lora_magnitude_vector = self._parameter(magnitude, like, is_split=split.dim == 0)

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of A, B or the magnitude. dim: the one that may be split."""
        if self.split.dim != dim:
            return whole
        return whole.chunk(self.split.size, dim)[self.split.group.rank()]

    def _parameter(
        self, values: torch.Tensor, like: torch.Tensor, *, is_split: bool
    ) -> torch.nn.Parameter:
        """Make a parameter, and say to Megatron how its gradient and its norm are reduced."""
        parameter = torch.nn.Parameter(values.to(like.device, like.dtype, copy=True).contiguous())
        described: Any = parameter
        by_expert = self.split.is_expert and not self.shared
        described.allreduce = not by_expert
        if is_split:
            set_tensor_model_parallel_attributes(parameter, True, self.split.dim, 1)
        elif by_expert and self.split.group.size() == 1:
            # no other rank has this expert: 0.16.1 would count it on the first tensor rank only
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        else:
            # each tensor rank has seen some of the tokens, or some of the columns
            described.sequence_parallel = self.split.sequence_parallel and not by_expert
        return parameter

    @property
    def sums_gradients(self) -> bool:
        """Whether each tensor rank of an expert has only a part of the gradient of what is whole on
        all of them. Megatron adds up the parts of other layers in the end, and those of experts
        nowhere."""
        is_split = self.split.dim is not None and self.split.size > 1
        return self.split.is_expert and not self.shared and is_split

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output here. states: [..., in] as the layer has it.

        Collective over the tensor ranks."""
        a: torch.Tensor = self.lora_A
        b: torch.Tensor = self.lora_B
        split = self.split
        if self.sums_gradients and split.dim == 0:
            a = copy_to_tensor_model_parallel_region(a, group=split.group)
        if self.sums_gradients and split.dim == 1:
            b = copy_to_tensor_model_parallel_region(b, group=split.group)
        low = self._brought_together(F.linear(states, a))
        return F.linear(low, b) * self.scale

    def _brought_together(self, low: torch.Tensor) -> torch.Tensor:
        """Let tensor ranks exchange `A x`, [..., rank], as their layer does its input or output."""
        split = self.split
        if split.is_expert or split.size == 1:
            return low
        exchanged: torch.Tensor
        if split.dim == 0 and split.sequence_parallel:
            exchanged = gather_from_sequence_parallel_region(low, group=split.group)
        elif split.dim == 0:
            exchanged = copy_to_tensor_model_parallel_region(low, group=split.group)
        elif split.sequence_parallel:
            exchanged = reduce_scatter_to_sequence_parallel_region(low, group=split.group)
        else:
            exchanged = reduce_from_tensor_model_parallel_region(low, group=split.group)
        return exchanged

    def row_norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `||W + scale B A||` of each row that is here, fp32 [rows], without a gradient.

        weight: this rank's part of W. Collective over the tensor ranks where they share rows."""
        with torch.no_grad():
            squares = self._square_norms(weight)
            if self.split.dim == 1 and self.split.size > 1:
                dist.all_reduce(squares, group=self.split.group)
            norms: torch.Tensor = squares.sqrt()
        # A magnitude begins as the norm in its own precision; so their quotient begins as 1.
        return norms.to(weight.dtype).float()

    def _square_norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sums of the squares of `W + scale B A` over the columns here, fp32 [rows]."""
        a = self.lora_A.detach().float()
        b = self.lora_B.detach().float()
        adapted = torch.addmm(weight.detach().float(), b, a, alpha=self.scale)
        norms: torch.Tensor = torch.linalg.vector_norm(adapted, dim=1)
        return norms.square()

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Return what the outputs are multiplied by, fp32 [rows]; the magnitude has its gradient.

        norms: of `row_norms`."""
        magnitude = self.lora_magnitude_vector
        assert magnitude is not None  # of DoRA
        own: torch.Tensor = magnitude
        if self.sums_gradients and self.split.dim == 1:
            own = copy_to_tensor_model_parallel_region(own, group=self.split.group)
        return own.float() / norms

    def begin_magnitude(self, weight: torch.Tensor) -> None:
        """Let the magnitude be that of the weight as it is, so that nothing changes. Collective."""
        assert self.lora_magnitude_vector is not None  # of DoRA
        self.lora_magnitude_vector.data.copy_(self.row_norms(weight))

    def product(self) -> torch.Tensor:
        """Return `scale B A` of this rank's part of the weight, fp32 [its rows, its columns]."""
        return low_rank_product(self.lora_A, self.lora_B, self.scale)

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """Yield each parameter's attribute, and which part of the whole it is, by PEFT's name."""
        split = self.split
        for attribute, dim, suffix in _ATTRIBUTES:
            name = f"{self.module}.{attribute}{suffix}"
            parameter = getattr(self, attribute)
            if parameter is None:
                continue
            if split.dim == dim and split.size > 1:
                yield (
                    attribute,
                    Shard(name, parameter, dim, split.size, split.group.rank(), split.group),
                )
            else:
                yield attribute, Shard(name, parameter)


def _uniform(key: str, rank: int, num_inputs: int) -> torch.Tensor:
    """Return A of a whole layer, fp32 [rank, in], drawn by `key` alone."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7]))
    bound = 1 / math.sqrt(num_inputs)
    values = torch.empty(rank, num_inputs, device="cpu")
    return values.uniform_(-bound, bound, generator=generator)
