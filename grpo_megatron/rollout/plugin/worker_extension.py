"""Methods that `/collective_rpc` reaches in every engine worker (`--worker-extension-cls`)."""

from collections.abc import Callable
from typing import Any

import msgspec

from grpo_megatron.rollout.plugin import adapter_slot
from grpo_megatron.rollout.plugin.kept_boxes import record_kept_boxes
from grpo_megatron.weights.tensor_entry import TensorEntry


class WorkerExtension:
    """Base class that vLLM gives to its workers; the attributes are the worker's own."""

    weight_transfer_engine: Any  # StreamWeightTransferEngine
    vllm_config: Any  # VllmConfig
    reload_weights: Callable[..., None]

    def update_report(self) -> dict[str, Any]:
        """Tell what came of the last update, as `StreamWeightTransferEngine.report` does."""
        report: dict[str, Any] = self.weight_transfer_engine.report()
        return report

    def begin_receiving(self, publish: int) -> None:
        """Let a publish arrive between decoding steps; `/update_weights` loads it."""
        self.weight_transfer_engine.begin_receiving(publish)

    def kept_boxes(self, tensors: list[Any]) -> dict[str, Any]:
        """Tell which `boxes` of each checkpoint tensor this worker keeps, by name.

        tensors: `TensorEntry` as JSON values. `whole`: why some are taken whole, by name."""
        entries = msgspec.convert(tensors, list[TensorEntry])
        boxes, whole = record_kept_boxes(self.weight_transfer_engine.model, entries)
        return {"boxes": msgspec.to_builtins(boxes), "whole": whole}

    def adapter_refusals(self, tensors: list[Any]) -> dict[str, str]:
        """Tell which tensors of adapters this worker cannot take, and why, by name.

        tensors: `TensorEntry` as JSON values."""
        entries = msgspec.convert(tensors, list[TensorEntry])
        return adapter_slot.refusals(self.weight_transfer_engine.model, entries)

    def adapter_checksums(self) -> dict[str, str]:
        """Tell the digests of what the layers compute of the adapters, by domain and layer."""
        return adapter_slot.checksums(self.weight_transfer_engine.model)

    def reload_from_path(self, path: str) -> None:
        """Load the Hugging Face checkpoint directory `path` in place.

        vLLM reloads with the loader it started with, and that of a server started with
        `--load-format dummy` reads no files: from here on it is the default one."""
        self.vllm_config.load_config.load_format = "auto"
        self.reload_weights(weights_path=path)

    def abandon_update(self) -> None:
        """Forget a broken-off update: vLLM 0.32 refuses the next one, or finishes layers early."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._weight_update_active = False
        for layer in self.weight_transfer_engine.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
