"""The parts of the model that this rank holds, under global names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_LOCAL_EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc\d\.(?:weight|bias))(\d+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """The process groups over which one copy of the model is split."""

    tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """One local weight: `tensor` is part `rank` of `size` along `dim` (None: whole)."""

    name: str
    tensor: torch.Tensor
    dim: int | None
    size: int
    rank: int
    group: dist.ProcessGroup | None

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.dim is not None:
            shape[self.dim] *= self.size
        return tuple(shape)


def local_shards(chunks: Sequence[torch.nn.Module], num_experts: int,
                 groups: ModelGroups) -> Iterator[Shard]:
    """Every parameter and selection bias of this rank's chunks; layers and experts made global."""
    first_expert = num_experts // groups.expert.size() * groups.expert.rank()
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in _weights(model):
            name = _LAYER.sub(lambda m, n=numbers: f"decoder.layers.{n[int(m[1])]}.", name)
            name = _LOCAL_EXPERT.sub(lambda m: m[1] + str(int(m[2]) + first_expert), name)
            yield _describe(name, parameter, groups)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            # Float16Module has rounded it; the router makes it fp32 again only when it is used
            buffer.data = buffer.data.float()
            yield name, buffer


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Strip DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _describe(name: str, parameter: torch.Tensor, groups: ModelGroups) -> Shard:
    group = groups.expert_tensor if ".experts." in name else groups.tensor
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Shard(name, parameter, None, 1, 0, None)
    dim = 1 if "linear_fc2" in name else parameter.partition_dim
    return Shard(name, parameter, dim, group.size(), group.rank(), group)
