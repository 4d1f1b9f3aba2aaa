"""Stream full Hugging Face tensors out of a sharded model, one Megatron tensor at a time.

All ranks take part in the same order. A tensor travels only to the ranks that send it on:
tensor parts are gathered, then the owner's copy goes to the sender.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_megatron.weights.layout import AttentionShape, join, split
from grpo_megatron.weights.rules import Rule, resolve
from grpo_megatron.weights.shards import Shard


@dataclass(frozen=True, slots=True)
class GatherEntry:
    """One Megatron tensor of the whole model, who holds it, and what it becomes."""

    name: str
    kind: str
    hf_names: tuple[str, ...]
    shape: tuple[int, ...]  # full, vocabulary still padded
    dtype: torch.dtype
    holders: tuple[int, ...]  # global ranks that hold it, or a tensor-parallel part of it

    def source(self, receiver: int) -> int:
        """The rank that gathers it: the receiver itself where it can."""
        return receiver if receiver in self.holders else self.holders[0]


def plan_gather(shards: Sequence[Shard], rules: tuple[Rule, ...], *,
                tied_embeddings: bool) -> list[GatherEntry]:
    """The same list on every rank, in checkpoint order. Collective."""
    mine = [(s.name, s.full_shape, s.tensor.dtype) for s in shards]
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, mine)
    holders: dict[tuple, list[int]] = {}
    for rank, held in enumerate(world):
        for described in held:
            holders.setdefault(described, []).append(rank)
    entries = []
    for (name, shape, dtype), ranks in holders.items():
        if tied_embeddings and name == "output_layer.weight":
            continue
        kind, hf_names = resolve(rules, name)
        entries.append(GatherEntry(name, kind, tuple(hf_names), shape, dtype, tuple(ranks)))
    return sorted(entries, key=_checkpoint_order)


def assign_receivers(entries: Sequence[GatherEntry], senders: Sequence[int]) -> list[int]:
    """A sender per entry: one that holds it, else the one with the fewest bytes so far."""
    load = dict.fromkeys(senders, 0)
    receivers = []
    for entry in entries:
        candidates = [s for s in senders if s in entry.holders] or senders
        receiver = min(candidates, key=lambda s: (load[s], s))
        load[receiver] += math.prod(entry.shape) * entry.dtype.itemsize
        receivers.append(receiver)
    return receivers


def _checkpoint_order(entry: GatherEntry) -> tuple:
    layer = re.search(r"layers\.(\d+)\.", entry.name)
    expert = re.search(r"(?:local_experts\.|linear_fc\d\.weight)(\d+)", entry.name)
    part = 0 if entry.name.startswith("embedding") else 1 if layer else 2
    return (part, int(layer[1]) if layer else 0, re.sub(r"\d+", "#", entry.name),
            int(expert[1]) if expert else 0)


def hf_shapes(entry: GatherEntry, shape: AttentionShape, vocab_size: int,
              ) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Hugging Face tensors that `entry` becomes."""
    parts = split(entry.kind, torch.empty(entry.shape, device="meta"), shape, vocab_size)
    return [(n, tuple(t.shape)) for n, t in zip(entry.hf_names, parts, strict=True)]


@torch.no_grad()
def stream(entries: Sequence[GatherEntry], shards: Sequence[Shard], shape: AttentionShape, *,
           vocab_size: int, receivers: Sequence[int],
           ) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield `(receiver, Hugging Face name, full tensor)` on the receiver of each entry.

    Args:
        receivers: per entry, the global rank that wants it. Other ranks yield nothing for it.

    Collective: every rank must exhaust the iterator.
    """
    local = {s.name: s for s in shards}
    rank = dist.get_rank()
    for entry, receiver in zip(entries, receivers, strict=True):
        held = local.get(entry.name)
        source = entry.source(receiver)
        full = _gather_parts(entry, held, source) if held is not None else None
        if source != receiver:
            if rank == source:
                dist.send(full.contiguous(), receiver)
            elif rank == receiver:
                full = torch.empty(entry.shape, dtype=entry.dtype, device=_device(shards))
                dist.recv(full, source)
        if rank == receiver:
            parts = split(entry.kind, full, shape, vocab_size)
            for name, tensor in zip(entry.hf_names, parts, strict=True):
                yield receiver, name, tensor


def _gather_parts(entry: GatherEntry, held: Shard, source: int) -> torch.Tensor:
    """The full tensor in the tensor-parallel group of `source`; elsewhere the part itself."""
    tensor = held.tensor.detach()
    if held.dim is None:
        return tensor
    if source not in dist.get_process_group_ranks(held.group):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(held.size)]
    dist.all_gather(parts, tensor.contiguous(), group=held.group)
    return join(entry.kind, parts, held.dim)


def _device(shards: Sequence[Shard]) -> torch.device:
    return shards[0].tensor.device if shards else torch.device("cpu")
