"""CPU: experts without adapters keep their kernel where other layers have adapters.

Defect (vLLM 0.32.0, model_executor/layers/fused_moe/oracle/unquantized.py:234): with LoRA on, the
experts of any layer are computed by a Triton kernel that knows adapters, also on a CPU, which has
none: the first request ends the engine (`module 'triton.language' has no attribute 'float32'`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


def apply() -> None:
    """Have the kernel of experts chosen as without LoRA: none of them has an adapter there."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    original = method.select_unquantized_moe_backend

    def select_unquantized_moe_backend(
        moe_config: FusedMoEConfig, *args: Any, **kwargs: Any
    ) -> Any:
        moe_config.is_lora_enabled = False
        return original(moe_config, *args, **kwargs)

    method.select_unquantized_moe_backend = select_unquantized_moe_backend
