"""The trainer's side of a publish: gather each tensor, stream it from its sender.

Senders are spread over the world. Each streams the tensors it holds itself, so an expert's
weights need not pass through rank 0; what no sender holds travels to one point to point."""

from typing import Any

import torch.distributed as dist

from grpo_megatron.config.run import PublishConfig
from grpo_megatron.errors import TransferError
from grpo_megatron.network import own_address
from grpo_megatron.trainer.requests import OpenedTransfer
from grpo_megatron.weights.gather import GatherEntry, ShardedModel, all_gathered, assign_to_senders
from grpo_megatron.weights.transfer import WeightSender
from grpo_megatron.weights.transfer_plan import TransferPlan

_MIN_BUCKETS = 2
_MIN_BUCKET_BYTES = 1 << 20


class ModelSender:
    """Streams the model of all ranks under Hugging Face names. Every method is collective."""

    def __init__(self, model: ShardedModel, config: PublishConfig):
        self.model = model
        self.config = config
        self.sender: WeightSender | None = None
        self.plan: TransferPlan | None = None
        self.parts: dict[int, list[GatherEntry]] = {}
        """What each sending rank sends, in order."""

    def open(self, num_workers: int) -> OpenedTransfer:
        """Make this publish's plan and listen for `num_workers` engine workers per sender."""
        rank = dist.get_rank()
        num_senders = self.config.num_senders
        senders = []  # spread over the ranks, and so over the nodes
        for index in range(num_senders):
            senders.append(index * dist.get_world_size() // num_senders)
        self.parts = assign_to_senders(self.model.entries, senders)
        self.plan = self._transfer_plan()
        address = None
        if rank in senders:
            self.sender = WeightSender(own_address(), num_workers, index=senders.index(rank))
            address = (self.sender.host, self.sender.port)
        addresses = all_gathered(address)
        return OpenedTransfer([addresses[sender] for sender in senders], self.plan)

    def _transfer_plan(self) -> TransferPlan:
        wire = []
        for index, part in enumerate(self.parts.values()):
            for entry in part:
                wire += entry.parameter.entries(entry.dtype, index)
        # Small models go in several buckets too: engines load one while the next is gathered.
        num_bytes = sum(tensor.num_bytes for tensor in wire)
        share = max(num_bytes // _MIN_BUCKETS, _MIN_BUCKET_BYTES)
        return TransferPlan(
            tuple(wire),
            num_senders=self.config.num_senders,
            bucket_bytes=min(self.config.bucket_mib << 20, share),
        )

    def join(self) -> None:
        """Wait until the engines' workers have joined.

        Raises TransferError on every rank if not all of them do."""
        failure = ""
        try:
            if self.sender is not None:
                self.sender.join()
        except TransferError as error:
            failure = error.message
        _together(None, failure)

    def send(self, version: int) -> dict[str, str]:
        """Stream everything once under weight version `version`.

        Returns digests by Hugging Face name. Raises TransferError, on every rank, where an engine
        does not take it; the next `open` begins with new groups."""
        own_digests: dict[str, str] = {}
        failure = ""
        for rank, part in self.parts.items():
            # One sender at a time, as workers take them: a sender that went on to gather for the
            # next one before its own last bucket was out would wait for what waits for it.
            tensors = self.model.stream(part, [rank] * len(part))
            if rank == dist.get_rank():
                assert self.sender is not None and self.plan is not None  # opened
                try:
                    own_digests = self.sender.send(tensors, self.plan, publish=version)
                except TransferError as error:
                    failure = error.message
            for _ in tensors:  # ranks that send nothing more still take part in the gathers
                pass
        digests: dict[str, str] = {}
        for part in _together(own_digests, failure):
            digests.update(part)
        return digests


def _together(found: Any, failure: str) -> tuple[Any, ...]:
    """Return every rank's `found`. Raises TransferError on all ranks where one has a `failure`."""
    parts, failures = zip(*all_gathered((found, failure)), strict=True)
    if any(failures):
        raise TransferError(
            max(failures),
            where="publish",
            remedy="look for the first error in the logs of the engines",
        )
    return parts
