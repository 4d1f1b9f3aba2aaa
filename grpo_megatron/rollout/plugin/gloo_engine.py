"""vLLM weight-transfer backend `gloo`: the receiving end of `grpo_megatron.weights.transfer`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import base

from grpo_megatron.rollout.plugin.worker_extension import NamedTensors, noise_of_environment
from grpo_megatron.weights.transfer import WeightReceiver
from grpo_megatron.weights.transfer_plan import TransferPlan


@dataclass
class GlooInitInfo(base.WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`."""

    senders: list[tuple[str, int]]
    rank_offset: int  # rank of this replica's first worker; rank 0 is the sender
    world_size: int  # one sender and the workers of all replicas
    timeout_s: float


@dataclass
class GlooUpdateInfo(base.WeightTransferUpdateInfo):
    """Body of `/update_weights`."""

    plan: dict[str, Any]
    publish: int


class GlooWeightTransferEngine(base.WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives a publish bucket by bucket and loads it layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, str] = {}
        """Digest of every tensor of the last publish, as it arrived."""
        self.before_load: Callable[[NamedTensors], NamedTensors] | None = None
        """Fault injection for tests: changes what is loaded, after digests were taken."""
        self._receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = WeightReceiver(
            [(host, port) for host, port in init_info.senders], timeout_s=init_info.timeout_s,
            rank=init_info.rank_offset + worker, world_size=init_info.world_size)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received = {}
        self.before_load = self.before_load or noise_of_environment()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._receiver is None:
            raise RuntimeError("/init_weight_transfer_engine was not called")
        plan = TransferPlan.from_json(update_info.plan)
        self.received = self._receiver.receive(plan, self._load, publish=update_info.publish)

    def _load(self, tensors: NamedTensors) -> None:
        if self.before_load is not None:
            tensors = self.before_load(tensors)
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self.before_load = None

    def shutdown(self) -> None:
        self._receiver = None
