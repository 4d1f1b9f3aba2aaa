"""CPU: weights in FP8 with a scale for every block, on every processor and in float32, too.

Lack (vLLM 0.32.0): the CPU build's kernels for such weights need AMX
(kernels/linear/scaled_mm/cpu.py:241, fused_moe/experts/cpu_moe.py:450), so that no model that has
them starts on another processor, and activations in float32 are refused (quantization/fp8.py:142).
Here the weights are kept in FP8 as everywhere, and multiplied after each matrix was made of them in
the type of the activations: slow, exact, and the same on every laptop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpo_megatron.rollout.plugin.cpu_expert_map import own_experts
from grpo_megatron.weights.fp8_blocks import dequantise

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation


def apply() -> None:
    """Give vLLM kernels for every processor, which it takes before its own."""
    _allow_float32()
    _add_linear_kernel()
    _replace_experts()


def _allow_float32() -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    supported = Fp8Config.get_supported_act_dtypes()

    def with_float32(cls: type[Fp8Config]) -> list[torch.dtype]:
        return [*supported, torch.float32]

    Fp8Config.get_supported_act_dtypes = classmethod(with_float32)


def _add_linear_kernel() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms import PlatformEnum

    class DequantisedWeights(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]  # without types
        """Multiplies by a matrix that is made of its FP8 numbers and scales."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """On every processor."""
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leave numbers and scales as they are in the checkpoint."""

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            """Multiply A [tokens, in] by B [out, in], whose scales are Bs; As has no meaning."""
            return torch.nn.functional.linear(A, dequantise(B, Bs, A.dtype))

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, DequantisedWeights)


def _replace_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    class DequantisedExperts(cpu_moe.CPUExpertsFp8):  # type: ignore[misc]  # without types
        """Computes experts whose matrices are made of their FP8 numbers and scales."""

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        @staticmethod
        def _supports_routing_method(*_: Any) -> bool:
            return True  # the router is not this class's

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: MoEActivation,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            a1q_scale: torch.Tensor | None,
            a2_scale: torch.Tensor | None,
            workspace13: torch.Tensor | None,
            workspace2: torch.Tensor | None,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            """Write the weighted sum over chosen experts to `output` [tokens, hidden]."""
            if apply_router_weight_on_input:
                raise NotImplementedError("weights of experts that belong to their inputs")
            if expert_map is not None:
                topk_ids, topk_weights = own_experts(topk_ids, topk_weights, expert_map)
            output.zero_()
            for expert in topk_ids.unique().tolist():
                tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
                inputs = hidden_states[tokens]
                gate_up = dequantise(w1[expert], self.w1_scale[expert], inputs.dtype)
                gate, up = torch.nn.functional.linear(inputs, gate_up).chunk(2, dim=-1)
                down = dequantise(w2[expert], self.w2_scale[expert], inputs.dtype)
                activated = torch.nn.functional.silu(gate) * up
                weights = topk_weights[tokens, place].unsqueeze(1)
                of_expert = torch.nn.functional.linear(activated, down) * weights
                output.index_add_(0, tokens, of_expert.to(output.dtype))

    def as_they_are(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w13, w2

    cpu_moe.CPUExpertsFp8 = DequantisedExperts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = as_they_are
