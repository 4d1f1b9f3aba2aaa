"""The trainer's side of a publish: every rank sends the parts that it holds.

Nothing is gathered; which part goes to which engine worker is planned in `weights.publish_plan`."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_megatron.config.run import PublishConfig
from grpo_megatron.errors import TransferError
from grpo_megatron.network import own_address
from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.carrier_names import Carrier, LinkKind
from grpo_megatron.weights.gather import all_gathered
from grpo_megatron.weights.publish_plan import (
    HeldBox,
    Kept,
    OpenedStream,
    SentWeights,
    plan_streams,
    tensors_of,
)
from grpo_megatron.weights.tensor_entry import TensorEntry
from grpo_megatron.weights.transfer import StreamSender


class Reader(Protocol):
    """Reads parts of published tensors: `PieceReader`, `Fp8Reader`."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor."""


class PublishedModel(Protocol):
    """What a publish sends of a model: `ShardedModel` as it is, `Fp8Model` in FP8."""

    def held_boxes(self) -> list[HeldBox]:
        """Say which parts of which tensors this rank can send."""

    def reader(self) -> Reader:
        """Return what reads them as they are now. Collective."""


class ModelSender:
    """Sends the model of all ranks under Hugging Face names. Every method is collective.

    Attributes:
        senders: This rank's ends of the streams to which it contributes, in the plan's order."""

    def __init__(self, model: PublishedModel, config: PublishConfig, carrier: Carrier = "gloo"):
        self.model = model
        self.config = config
        self.senders: list[StreamSender] = []
        self._carrier: Carrier = carrier
        self._addresses: dict[int, tuple[str, int]] = {}
        self._num_buckets = 0

    def tensors(self) -> list[TensorEntry]:
        """List the Hugging Face tensors of the model, in checkpoint order."""
        return tensors_of(self._held_by_rank())

    def _held_by_rank(self) -> list[list[HeldBox]]:
        held: list[list[HeldBox]] = all_gathered(self.model.held_boxes())
        return held

    def open(self, kept: Sequence[Kept]) -> list[OpenedStream]:
        """Plan the transfer to engine workers that keep `kept`, and listen for them.

        Raises MismatchError where they keep something that the trainer does not have."""
        streams = plan_streams(self._held_by_rank(), kept, self.config.bucket_mib << 20)
        rank = dist.get_rank()
        self.close()
        hosted: dict[int, tuple[str, int]] = {}
        for number, stream in enumerate(streams):
            self._num_buckets = max(self._num_buckets, len(stream.buckets()))
            if rank not in stream.senders:
                continue
            sender = StreamSender(
                number, stream, rank, own_address(), self._carrier, delta=self.config.delta
            )
            self.senders.append(sender)
            if rank == stream.senders[0]:
                hosted[number] = sender.listen()
        for addresses in all_gathered(hosted):
            self._addresses.update(addresses)
        opened = []
        for number, stream in enumerate(streams):
            host, port = self._addresses[number]
            opened.append(OpenedStream(host, port, self._carrier, stream, self.config.delta))
        return opened

    def join(self) -> dict[LinkKind, int]:
        """Wait until the engines' workers have joined.

        Returns how many links between two members carry weights in which way. Raises TransferError
        on every rank if not all of them do."""

        def join_all() -> None:
            for sender in self.senders:
                sender.join(self._addresses[sender.number])

        self._together(join_all)
        of_streams: list[Counter[LinkKind]] = []
        for sender in self.senders:
            if sender.group.rank == 0:  # every member of a stream knows all of its links
                of_streams.append(sender.group.links())
        kinds: Counter[LinkKind] = Counter()
        for of_rank in all_gathered(of_streams):
            for found in of_rank:
                kinds.update(found)
        return dict(kinds)

    def send(self, version: int) -> SentWeights:
        """Send everything once under weight version `version`.

        Raises TransferError, on every rank, where an engine does not take it; the next publish
        begins with `open`."""

        def send_all() -> None:
            reader = self.model.reader()
            # Bucket by bucket on every rank: each worker waits for one bucket of all its senders.
            for bucket in range(self._num_buckets):
                for sender in self.senders:
                    sender.send(version, bucket, reader.read)
            for sender in self.senders:
                sender.finish()

        self._together(send_all)
        own = SentWeights()
        for sender in self.senders:
            own.digests.update(sender.digests)
            own.num_bytes += sender.num_bytes
            own.num_sent_bytes += sender.num_sent_bytes
        sent = SentWeights()
        for of_rank in all_gathered(own):
            sent.digests.update(of_rank.digests)
            sent.num_bytes += of_rank.num_bytes
            sent.num_sent_bytes += of_rank.num_sent_bytes
        return sent

    def _together(self, work: Callable[[], Any]) -> None:
        """Do this rank's work. Raises TransferError on all ranks where that of one fails."""
        failure = ""
        try:
            work()
        except TransferError as error:
            failure = error.message
            self.close()  # workers that live wait no longer
        failures = [text for text in all_gathered(failure) if text]
        if failures:
            self.close()
            raise TransferError(
                max(failures),
                where="publish",
                remedy="look for the first error in the logs of the engines",
            )

    def close(self) -> None:
        """Leave all streams."""
        for sender in self.senders:
            sender.close()
        self.senders = []
        self._addresses = {}
        self._num_buckets = 0
