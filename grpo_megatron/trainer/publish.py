"""The trainer's side of weight publishing: gather each tensor, stream it from its sender.

Senders are spread over the world. Each streams the tensors it holds itself, so an expert's
weights need not pass through rank 0; what no sender holds travels to one point to point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.config.rollout import PublishConfig
from grpo_megatron.network import own_address
from grpo_megatron.weights.gather import (
    GatherEntry,
    assign_receivers,
    hf_shapes,
    plan_gather,
    stream,
)
from grpo_megatron.weights.layout import AttentionShape
from grpo_megatron.weights.rules import Rule
from grpo_megatron.weights.shards import Shard
from grpo_megatron.weights.transfer import TransferPlan, WeightSender
from grpo_megatron.weights.transfer_plan import TensorEntry

_MIN_BUCKETS = 8


class WeightPublisher:
    """Streams the model of all ranks under Hugging Face names. Every method is collective."""

    def __init__(self, shards: Sequence[Shard], rules: tuple[Rule, ...], shape: AttentionShape,
                 vocab_size: int, config: PublishConfig, *, tied_embeddings: bool):
        self.shards, self.rules, self.shape = shards, rules, shape
        self.vocab_size, self.config, self.tied = vocab_size, config, tied_embeddings
        self.sender: WeightSender | None = None
        self.plan: TransferPlan | None = None
        self._entries: list[GatherEntry] = []
        self._receivers: list[int] = []
        self._sender_ranks: list[int] = []

    @cached_property
    def gather_plan(self) -> list[GatherEntry]:
        return plan_gather(self.shards, self.rules, tied_embeddings=self.tied)

    def open(self, num_workers: int) -> dict[str, Any]:
        """Make this publish's plan and listen for `num_workers` engine workers per sender.

        Returns:
            `senders`: [host, port] each; `plan`: the transfer plan as JSON.
        """
        world, count = dist.get_world_size(), self.config.num_senders
        ranks = self._sender_ranks = [i * world // count for i in range(count)]
        receivers = assign_receivers(self.gather_plan, ranks)
        # A worker takes the senders in turn, so each sender's tensors must be gathered before
        # the next one's: in checkpoint order a sender would wait for workers that wait for it.
        order = sorted(range(len(receivers)), key=lambda i: ranks.index(receivers[i]))
        self._entries = [self.gather_plan[i] for i in order]
        self._receivers = [receivers[i] for i in order]
        wire = tuple(self._wire_entries(ranks))
        # Small models go in several buckets too: engines load one while the next is gathered.
        part = max(sum(entry.num_bytes for entry in wire) // _MIN_BUCKETS, 1 << 20)
        self.plan = TransferPlan(wire, num_senders=count,
                                 bucket_bytes=min(self.config.bucket_mib << 20, part))
        mine = None
        if dist.get_rank() in ranks:
            address = own_address()
            self.sender = WeightSender(address, num_workers, index=ranks.index(dist.get_rank()))
            mine = [address, self.sender.port]
        addresses: list = [None] * world
        dist.all_gather_object(addresses, mine)
        return {"senders": [addresses[r] for r in ranks], "plan": self.plan.to_json()}

    def join(self) -> dict[str, Any]:
        """Wait until the engines' workers have joined."""
        if self.sender is not None:
            self.sender.join()
        return {}

    def send(self, version: int) -> dict[str, Any]:
        """Stream everything once; returns `digests` by Hugging Face name."""
        digests: dict[str, str] = {}
        for index, rank in enumerate(self._sender_ranks):
            # One sender at a time, as workers take them: a sender that went on to gather for the
            # next one before its own last bucket was out would wait for what waits for it.
            part = [i for i, receiver in enumerate(self._receivers) if receiver == rank]
            tensors = self._stream([self._entries[i] for i in part], [rank] * len(part))
            if self.sender is not None and self.sender.index == index:
                digests = self.sender.send(tensors, self.plan, publish=version)
            for _ in tensors:  # ranks that send nothing still take part in the gathers
                pass
        world: list = [None] * dist.get_world_size()
        dist.all_gather_object(world, digests)
        return {"digests": {name: d for part in world for name, d in part.items()}}

    def _wire_entries(self, ranks: list[int]) -> Iterator[TensorEntry]:
        for entry, receiver in zip(self._entries, self._receivers, strict=True):
            dtype = str(entry.dtype).removeprefix("torch.")
            for name, shape in hf_shapes(entry, self.shape, self.vocab_size):
                yield TensorEntry(name, dtype, shape, ranks.index(receiver))

    def _stream(self, entries: Sequence[GatherEntry],
                receivers: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for _, name, tensor in stream(entries, self.shards, self.shape,
                                      vocab_size=self.vocab_size, receivers=receivers):
            yield name, tensor
