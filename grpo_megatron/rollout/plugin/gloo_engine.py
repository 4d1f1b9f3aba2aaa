"""vLLM weight-transfer backend `gloo`: the receiving end of `grpo_megatron.weights.transfer`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.weight_transfer import base

from grpo_megatron.errors import TransferError
from grpo_megatron.rollout.plugin.worker_extension import NamedTensors
from grpo_megatron.weights.transfer import WeightReceiver
from grpo_megatron.weights.transfer_plan import TransferPlan


@dataclass
class GlooInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]  # of a base without types
    """Body of `/init_weight_transfer_engine`."""

    senders: list[tuple[str, int]]
    rank_offset: int  # rank of this replica's first worker; rank 0 is the sender
    world_size: int  # one sender and the workers of all replicas
    timeout_s: float


@dataclass
class GlooUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Body of `/update_weights`."""

    plan: dict[str, Any]
    publish: int


class GlooWeightTransferEngine(
    base.WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]  # type: ignore[misc]  # as above
):
    """Receives a publish bucket by bucket and loads it layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, str] = {}  # digest of every tensor of the last publish
        self.failure = ""  # of the transfer, see `_noting`
        self._receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the groups of all senders; what goes wrong is in `failure`."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = None
        self.failure = ""
        with self._noting():
            self._receiver = WeightReceiver(
                init_info.senders,
                rank=init_info.rank_offset + worker,
                world_size=init_info.world_size,
                timeout_s=init_info.timeout_s,
            )

    def start_weight_update(self) -> None:
        """Let the model's layers wait for weights of a new publish."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received = {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Take all buckets of a publish; `received` has the digests, `failure` what went wrong."""
        plan = msgspec.convert(update_info.plan, TransferPlan)
        with self._noting():
            if self._receiver is None:
                raise TransferError(self.failure or "/init_weight_transfer_engine was not called")
            self.received = self._receiver.receive(plan, self.load, publish=update_info.publish)

    def load(self, tensors: NamedTensors) -> None:
        """Have the model take the tensors of a bucket."""
        self.model.load_weights(tensors)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """The controller asks for what went wrong: when one of several workers raises, vLLM's
        executor leaves the answers of the others, and takes them for those of the next call."""
        try:
            yield
        except TransferError as error:
            self.failure = error.message

    def finish_weight_update(self) -> None:
        """Process the layers that are not finished by their last tensor."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the groups."""
        self._receiver = None
