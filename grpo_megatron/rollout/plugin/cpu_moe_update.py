"""CPU: expert weights of an update must be prepacked like those of the first load.

Defect (vLLM 0.32.0, model_executor/layers/fused_moe/unquantized_fused_moe_method.py:191):
`_setup_kernel` lets the experts prepack their weights only when it builds the kernel. An update
copies the plain layout over the packed one: scrambled weights, wrong log-probs, no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )


def apply() -> None:
    """Let the experts of a CPU prepack their weights after every update."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    cls = method.UnquantizedFusedMoEMethod
    original = cls._setup_kernel

    def _setup_kernel(
        self: UnquantizedFusedMoEMethod,
        layer: RoutedExperts,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    cls._setup_kernel = _setup_kernel
