"""The trainer's side of weight publishing: gather each tensor, stream it from its sender.

Senders are spread over the world. Each streams the tensors it holds itself, so an expert's
weights need not pass through rank 0; what no sender holds travels to one point to point."""

from typing import Any

import msgspec
import torch.distributed as dist

from grpo_megatron.config.run import PublishConfig
from grpo_megatron.errors import TransferError
from grpo_megatron.network import own_address
from grpo_megatron.weights.gather import GatherEntry, ShardedModel, all_gathered, shared_out
from grpo_megatron.weights.transfer import TransferPlan, WeightSender

_MIN_BUCKETS = 2


class WeightPublisher:
    """Streams the model of all ranks under Hugging Face names. Every method is collective."""

    def __init__(self, model: ShardedModel, config: PublishConfig):
        self.model, self.config = model, config
        self.sender: WeightSender | None = None
        self.plan: TransferPlan | None = None
        self.parts: dict[int, list[GatherEntry]] = {}
        """What each sending rank sends, in order."""

    def open(self, num_workers: int) -> dict[str, Any]:
        """Make this publish's plan and listen for `num_workers` engine workers per sender. Returns
        `senders`, [host, port] each, and `plan`, the transfer plan as JSON."""
        rank, world, count = dist.get_rank(), dist.get_world_size(), self.config.num_senders
        ranks = [i * world // count for i in range(count)]
        self.parts = shared_out(self.model.entries, ranks)
        wire = tuple(tensor for index, part in enumerate(self.parts.values()) for entry in part
                     for tensor in entry.parameter.entries(entry.dtype, index))
        # Small models go in several buckets too: engines load one while the next is gathered.
        part = max(sum(entry.num_bytes for entry in wire) // _MIN_BUCKETS, 1 << 20)
        self.plan = TransferPlan(wire, num_senders=count,
                                 bucket_bytes=min(self.config.bucket_mib << 20, part))
        if rank in ranks:
            self.sender = WeightSender(own_address(), num_workers, index=ranks.index(rank))
        addresses = all_gathered(self.sender and [self.sender.host, self.sender.port])
        return {"senders": [addresses[r] for r in ranks], "plan": msgspec.to_builtins(self.plan)}

    def join(self) -> None:
        """Wait until the engines' workers have joined; TransferError on every rank if not all."""
        failure = ""
        try:
            if self.sender is not None:
                self.sender.join()
        except TransferError as error:
            failure = error.message
        _together(None, failure)

    def send(self, version: int) -> dict[str, Any]:
        """Stream everything once; returns `digests` by Hugging Face name. TransferError, on every
        rank, where an engine does not take it; the next `open` begins with new groups."""
        digests, failure = {}, ""
        for rank, part in self.parts.items():
            # One sender at a time, as workers take them: a sender that went on to gather for the
            # next one before its own last bucket was out would wait for what waits for it.
            tensors = self.model.stream(part, [rank] * len(part))
            if rank == dist.get_rank():
                try:
                    digests = self.sender.send(tensors, self.plan, publish=version)
                except TransferError as error:
                    failure = error.message
            for _ in tensors:  # ranks that send nothing more still take part in the gathers
                pass
        return {"digests": {name: digest for part in _together(digests, failure)
                            for name, digest in part.items()}}


def _together(found: Any, failure: str) -> tuple[Any, ...]:
    """Every rank's `found`; TransferError on all where one has a `failure`."""
    parts, failures = zip(*all_gathered((found, failure)), strict=True)
    if any(failures):
        raise TransferError(max(failures), where="publish",
                            remedy="look for the first error in the logs of the engines")
    return parts
