"""Stream full Hugging Face tensors out of a sharded model, one Megatron parameter at a time.

All ranks take part in the same order. A parameter travels only to the rank that wants it:
tensor-parallel parts are gathered, then a holder's copy goes to the receiver."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.weights.parameters import OUTPUT_LAYER, Parameter, TensorMap


@dataclass(frozen=True, slots=True)
class Shard:
    """One local weight: `tensor` is part `rank` of `size` along `dim` (None: whole)."""

    name: str
    tensor: torch.Tensor
    dim: int | None = None
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight, of which `tensor` may be a tensor-parallel part."""
        shape = list(self.tensor.shape)
        if self.dim is not None:
            shape[self.dim] *= self.size
        return tuple(shape)


_Described = tuple[str, tuple[int, ...], torch.dtype]
"""Name, full shape and type of a parameter."""


@dataclass(frozen=True, slots=True)
class GatherEntry:
    """One parameter of the whole model and who holds it."""

    parameter: Parameter
    dtype: torch.dtype
    holders: tuple[int, ...]  # global ranks that hold it, or a tensor-parallel part of it


class ShardedModel:
    """A model whose weights are spread over ranks: `shards` are the parts of this rank.

    `entries` says what the whole model consists of, `stream` brings full tensors together."""

    def __init__(self, tensor_map: TensorMap, shards: Sequence[Shard]):
        self.map = tensor_map
        self.shards = shards

    @cached_property
    def entries(self) -> list[GatherEntry]:
        """All parameters, the same list on every rank, in checkpoint order. Collective.

        Raises KeyError where a weight has no Hugging Face name."""
        held: list[_Described] = []
        for shard in self.shards:
            held.append((shard.name, shard.full_shape, shard.tensor.dtype))
        holders: dict[_Described, list[int]] = {}
        for rank, held_there in enumerate(all_gathered(held)):
            for described in held_there:
                holders.setdefault(described, []).append(rank)
        entries = []
        for (name, shape, dtype), ranks in sorted(holders.items(), key=_checkpoint_order):
            if self.map.tied_embeddings and name == OUTPUT_LAYER:
                continue  # the embedding is sent
            parameter = self.map.parameter(name, shape)
            entries.append(GatherEntry(parameter, dtype, tuple(ranks)))
        return entries

    @property
    def _device(self) -> torch.device:
        if not self.shards:
            return torch.device("cpu")
        return self.shards[0].tensor.device

    @torch.no_grad()
    def stream(
        self, entries: Sequence[GatherEntry], receivers: Sequence[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) on the receiver (a global rank) of each entry.

        Collective: every rank must exhaust the iterator."""
        local = {shard.name: shard for shard in self.shards}
        rank = dist.get_rank()
        for entry, receiver in zip(entries, receivers, strict=True):
            parameter = entry.parameter
            held = local.get(parameter.name)
            source = entry.holders[0]
            if receiver in entry.holders:
                source = receiver
            full: torch.Tensor | None = None
            if held is not None:
                full = _gather_parts(parameter, held, source)
            if source != receiver:
                if rank == source:
                    assert full is not None  # a source holds the parameter
                    dist.send(full.contiguous(), receiver)
                elif rank == receiver:
                    full = torch.empty(parameter.shape, dtype=entry.dtype, device=self._device)
                    dist.recv(full, source)
            if rank == receiver:
                assert full is not None  # held here, or received
                for (name, _), tensor in zip(parameter.hf, parameter.split(full), strict=True):
                    yield name, tensor


def all_gathered(value: Any) -> list[Any]:
    """Return the `value` of every rank, by rank; it must be picklable. Collective."""
    world: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(world, value)
    return world


def on_rank_0(action: Callable[..., object], *arguments: Any) -> None:
    """Call `action` on rank 0 only; the others wait until it has returned. Collective.

    Where it raises, rank 0 leaves the collective and the others wait for its time-out."""
    if dist.get_rank() == 0:
        action(*arguments)
    dist.barrier()


def assign_to_senders(
    entries: Sequence[GatherEntry], senders: Sequence[int]
) -> dict[int, list[GatherEntry]]:
    """Return the entries that each of `senders` (global ranks) sends, in order.

    An entry goes to a sender that holds it, or to any where none does; of several, to the one with
    the fewest bytes so far, the lowest rank first."""
    num_bytes = dict.fromkeys(senders, 0)
    parts: dict[int, list[GatherEntry]] = {sender: [] for sender in senders}

    def load(sender: int) -> tuple[int, int]:
        return num_bytes[sender], sender

    for entry in entries:
        candidates = [sender for sender in senders if sender in entry.holders]
        if not candidates:
            candidates = list(senders)
        sender = min(candidates, key=load)
        num_bytes[sender] += math.prod(entry.parameter.shape) * entry.dtype.itemsize
        parts[sender].append(entry)
    return parts


def _checkpoint_order(item: tuple[_Described, list[int]]) -> list[str | int]:
    """Sort key of a name: numbers by size, not by digits, so layer by layer, expert by expert."""
    (name, _, _), _ = item
    key: list[str | int] = []
    for part in re.split(r"(\d+)", name):
        if part.isdigit():
            key.append(int(part))
        else:
            key.append(part)
    return key


def _gather_parts(parameter: Parameter, held: Shard, source: int) -> torch.Tensor:
    """The full tensor in the tensor-parallel group of `source`; elsewhere the part itself."""
    tensor = held.tensor.detach()
    if held.dim is None or source not in dist.get_process_group_ranks(held.group):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(held.size)]
    dist.all_gather(parts, tensor.contiguous(), group=held.group)
    return parameter.join(parts, held.dim)
