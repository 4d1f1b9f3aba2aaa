"""Stream full Hugging Face tensors out of a sharded model, one Megatron parameter at a time.

All ranks take part in the same order. A parameter travels only to the rank that wants it:
tensor-parallel parts are gathered, then a holder's copy goes to the receiver."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.low_rank import merged
from grpo_megatron.weights.parameters import OUTPUT_LAYER, HeldTensor, Parameter
from grpo_megatron.weights.publish_plan import HeldBox, checkpoint_order
from grpo_megatron.weights.tensor_entry import TensorEntry, dtype_name


@dataclass(frozen=True, slots=True)
class Shard:
    """One local weight: `tensor` is part `rank` of `size` along `dim` (None: whole).

    What is given away is `tensor` plus `addend()`, fp32 of the same shape, if there is one: what
    adapters add to a weight that is kept as it is. `prepare` comes before, on all ranks that share
    the weight: it may exchange with them what `addend` needs."""

    name: str
    tensor: torch.Tensor
    dim: int | None = None
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    addend: Callable[[], torch.Tensor] | None = None
    prepare: Callable[[], None] | None = None

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """Return what is given away: the tensor itself, or a new one, rounded once.

        After `prepare` (see `ShardedModel.prepare`)."""
        if self.addend is None:
            return self.tensor.detach()
        return merged(self.tensor, self.addend())

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


class ParameterMap(Protocol):
    """Says what the parameters of a model are in a file: `TensorMap`, for weights."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding."""

    def parameter(self, name: str, shape: tuple[int, ...]) -> Parameter:
        """Find the tensors of a parameter with its full shape. Raises ConfigError for another."""


class ShardedModel:
    """A model whose weights are spread over ranks: `shards` are the parts of this rank.

    `entries` says what the whole model consists of, `stream` brings full tensors together."""

    def __init__(self, tensor_map: ParameterMap, shards: Sequence[Shard]):
        self.map = tensor_map
        self.shards = shards

    @cached_property
    def entries(self) -> list[GatherEntry]:
        """All parameters, the same list on every rank, in checkpoint order. Collective.

        Raises ConfigError where a weight has no Hugging Face name."""
        held: list[_Described] = []
        for shard in self.shards:
            held.append((shard.name, shard.full_shape, shard.tensor.dtype))
        holders: dict[_Described, list[int]] = {}
        for rank, held_there in enumerate(all_gathered(held)):
            for described in held_there:
                holders.setdefault(described, []).append(rank)
        entries = []
        for (name, shape, dtype), ranks in sorted(holders.items(), key=_order):
            if self.map.tied_embeddings and name == OUTPUT_LAYER:
                continue  # the embedding is sent
            parameter = self.map.parameter(name, shape)
            entries.append(GatherEntry(parameter, dtype, tuple(ranks)))
        return entries

    @torch.no_grad()
    def prepare(self) -> None:
        """Let the values of all shards be those of the present weights. Collective."""
        for shard in self.shards:
            if shard.prepare is not None:
                shard.prepare()

    def held_boxes(self) -> list[HeldBox]:
        """Say which parts of which Hugging Face tensors are on this rank.

        Raises ConfigError where a weight has no Hugging Face name."""
        boxes = []
        for shard in self.shards:
            if self.map.tied_embeddings and shard.name == OUTPUT_LAYER:
                continue  # the embedding is sent
            stand_in = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device="meta")
            for held in self._held_by(shard, stand_in):
                entry = TensorEntry(held.name, dtype_name(shard.tensor.dtype), held.shape)
                boxes.append(HeldBox(entry, held.box))
        return boxes

    def reader(self) -> "PieceReader":
        """Return what reads parts of the weights as they are now. Collective."""
        return PieceReader(self)

    def _held_by(self, shard: Shard, tensor: torch.Tensor) -> list[HeldTensor]:
        parameter = self.map.parameter(shard.name, shard.full_shape)
        return parameter.held_by(tensor, shard.dim, shard.size, shard.rank)

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
        self.prepare()
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


class PieceReader:
    """Gives parts of Hugging Face tensors that are on this rank, as the weights are now.

    Made anew for each pass over the weights: where rows of several tensors are interleaved in one
    weight, it keeps a copy of the last one that was asked for. To make one is collective."""

    def __init__(self, model: ShardedModel):
        model.prepare()
        self._model = model
        self._shards: dict[str, Shard] = {}
        for shard in model.shards:
            if model.map.tied_embeddings and shard.name == OUTPUT_LAYER:
                continue
            for name, _ in model.map.parameter(shard.name, shard.full_shape).hf:
                self._shards[name] = shard
        self._last: Shard | None = None
        self._held: list[HeldTensor] = []

    @torch.no_grad()
    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return `box` of the tensor `name`, a view of the weight where that is possible.

        Raises KeyError where it is not on this rank."""
        shard = self._shards[name]
        if shard is not self._last:
            self._held = self._model._held_by(shard, shard.value())
            self._last = shard
        for held in self._held:
            if held.name == name and held.box.contains(box):
                return box.view_in(held.box, held.tensor)
        raise KeyError(f"{box} of {name!r} is not on this rank")


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


def _order(item: tuple[_Described, list[int]]) -> list[str | int]:
    (name, _, _), _ = item
    return checkpoint_order(name)


def _gather_parts(parameter: Parameter, held: Shard, source: int) -> torch.Tensor:
    """Return the full tensor in the tensor-parallel group of `source`; elsewhere the part
    itself."""
    tensor = held.value()
    if held.dim is None or source not in dist.get_process_group_ranks(held.group):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(held.size)]
    dist.all_gather(parts, tensor.contiguous(), group=held.group)
    return parameter.join(parts, held.dim)
