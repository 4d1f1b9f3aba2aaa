"""vLLM weight-transfer backend `grpo_megatron`: receives what `weights.transfer` sends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import base

from grpo_megatron.errors import MismatchError, TransferError
from grpo_megatron.network import own_address
from grpo_megatron.rollout.plugin import adapter_slot
from grpo_megatron.rollout.plugin.received_parts import TensorParts, loadable
from grpo_megatron.rollout.plugin.staged_publish import StagedPublish
from grpo_megatron.weights.boxes import whole_box
from grpo_megatron.weights.publish_plan import OpenedStream
from grpo_megatron.weights.transfer import LoadParts, StreamReceiver

logger = logging.getLogger(__name__)


@dataclass
class StreamInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]  # of a base without types
    """Body of `/init_weight_transfer_engine`."""

    streams: list[Any]  # (number, `OpenedStream`) of each worker of this replica, as JSON values
    first_worker: int  # number of this replica's first worker, counted over all replicas
    timeout_s: float
    adapter: dict[str, float] | None = None  # of adapters: their rank and scale; None: of weights


@dataclass
class StreamUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Body of `/update_weights`."""

    publish: int


class StreamWeightTransferEngine(
    base.WeightTransferEngine[StreamInitInfo, StreamUpdateInfo]  # type: ignore[misc]  # as above
):
    """Receives a publish bucket by bucket and loads it layer by layer."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failure = ""  # of the transfer, see `_noting`
        self.receiver: StreamReceiver | None = None
        self.adapter: dict[str, float] | None = None  # of `StreamInitInfo`
        self._received: dict[str, torch.Tensor] = {}  # of adapters
        self._staged: StagedPublish | None = None  # what comes, or came, while the engine decodes

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        """Join this worker's stream; what goes wrong is in `failure`."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        number, values = init_info.streams[worker]
        opened = msgspec.convert(values, OpenedStream)
        self.receiver = None
        self._staged = None
        self.adapter = init_info.adapter
        self.failure = ""
        with self._noting():
            self.receiver = StreamReceiver(
                number,
                opened.stream,
                init_info.first_worker + worker,
                (opened.host, opened.port),
                own_address(),
                opened.carrier,
                init_info.timeout_s,
                delta=opened.delta,
            )

    def start_weight_update(self) -> None:
        """Let the model's layers wait for weights of a new publish; adapters leave them."""
        if self.adapter is not None:
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def begin_receiving(self, publish: int) -> None:
        """Let a publish arrive while the engine decodes, until `receive_weights` takes it."""
        with self._noting():
            self._staged = StagedPublish(self._joined_receiver(), publish)

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        """Take all buckets of a publish; `failure` says what went wrong."""
        with self._noting():
            receiver = self._joined_receiver()
            if self.adapter is None:
                adapter_slot.forget(self.model)  # they were for other weights
                self._receive(receiver, update_info.publish, self.load)
            else:
                self._receive_adapters(receiver, update_info.publish, self.adapter)

    def _joined_receiver(self) -> StreamReceiver:
        if self.receiver is None:
            raise TransferError(self.failure or "/init_weight_transfer_engine was not called")
        return self.receiver

    def _receive(self, receiver: StreamReceiver, publish: int, load: LoadParts) -> None:
        """Hand the buckets of a publish to `load`: those that have come, or as they come."""
        staged = self._staged
        self._staged = None
        if staged is None:
            receiver.receive(publish, load)
            return
        if staged.number != publish:
            raise TransferError(f"publish {staged.number} has come, and {publish} is to be loaded")
        for tensors in staged.take():
            load(tensors)

    def load(self, tensors: TensorParts) -> None:
        """Have the model take the parts of a bucket."""
        with adapter_slot.without_wrappers(self.model):
            self.model.load_weights(loadable(tensors))

    def _receive_adapters(
        self, receiver: StreamReceiver, publish: int, adapter: dict[str, float]
    ) -> None:
        """Take all adapters; they replace those before when the update is finished."""
        self._received = {}
        self._receive(receiver, publish, self._keep)
        received = self._received
        self._received = {}
        adapter_slot.take(self.model, received, int(adapter["rank"]), adapter["scale"])

    def _keep(self, tensors: TensorParts) -> None:
        """Copy the tensors of a bucket out of its messages."""
        for tensor, parts in tensors:
            self._received[tensor.name] = parts[whole_box(tensor.shape)].clone()

    def report(self) -> dict[str, Any]:
        """Tell what came of the last publish.

        `failure` of the transfer, `changed` tensors, `digests` of messages, `stream` number."""
        if self.receiver is None:
            return {"failure": self.failure, "changed": [], "digests": {}, "stream": 0}
        return {
            "failure": self.failure,
            "changed": self.receiver.changed,
            "digests": self.receiver.digests,
            "stream": self.receiver.number,
        }

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """The controller asks for what went wrong: when one of several workers raises, vLLM's
        executor leaves the answers of the others, and takes them for those of the next call."""
        try:
            yield
        except (TransferError, MismatchError) as error:
            # where the sender fails because of it, nobody asks for `failure` any more
            logger.error("weights were not taken: %s", error)
            self.failure = error.message

    def finish_weight_update(self) -> None:
        """Process the layers that are not finished by their last tensor."""
        if self.adapter is not None:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the groups."""
        self.receiver = None
        self._staged = None
