"""Pure transforms between Hugging Face tensors and full or sharded Megatron tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the interleaving of q, k and v depends on."""

    num_heads: int
    num_query_groups: int
    head_dim: int


def merge(kind: str, tensors: list[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    """Hugging Face tensors to one full Megatron tensor."""
    if kind == "qkv":
        groups = [t.reshape(shape.num_query_groups, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(groups, 1).flatten(0, 1)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def split(kind: str, tensor: torch.Tensor, shape: AttentionShape,
          vocab_size: int) -> list[torch.Tensor]:
    """One full Megatron tensor to its Hugging Face tensors (views)."""
    if kind == "qkv":
        per_group, d = shape.num_heads // shape.num_query_groups, shape.head_dim
        grouped = tensor.view(shape.num_query_groups, (per_group + 2) * d, *tensor.shape[1:])
        return [x.flatten(0, 1) for x in grouped.split([per_group * d, d, d], 1)]
    if kind == "gate_up":
        return list(tensor.chunk(2))
    return [tensor[:vocab_size]] if kind == "vocab" else [tensor]


def shard(kind: str, tensor: torch.Tensor, dim: int | None, size: int, rank: int) -> torch.Tensor:
    """This rank's part. Gate and up are split each for itself, so that they stay aligned."""
    if dim is None:
        return tensor
    if kind == "gate_up":
        return torch.cat([half.chunk(size, dim)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dim)[rank]


def join(kind: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Inverse of `shard`."""
    if kind == "gate_up":
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        parts = [piece for half in halves for piece in half]
    return torch.cat(parts, dim)
