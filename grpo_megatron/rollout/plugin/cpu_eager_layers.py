"""CPU: less Python between the kernels of an eager forward pass.

Gap (vLLM 0.32.0): without compilation a decode step of a small model on a CPU is mostly Python.
RMSNorm runs as seven operations though there are kernels for it (vllm_c.py), attention passes the
dispatcher twice (attention.py:548), a plain expert layer ten functions (moe_runner.py)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.layernorm import RMSNorm

_NORM_MULTIPLE = 8  # elements in a vector of the kernel; a latent may have any number


def apply() -> None:
    """Shorten the ways of RMSNorm, attention and plain experts to their kernels."""
    _norm_by_kernel()
    _attention_without_dispatcher()
    _plain_experts_directly()


def _norm_by_kernel() -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    def forward_cpu(
        self: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight = self.weight.data
        if (
            type(self) is not RMSNorm
            or not self.has_weight
            or weight.dtype != x.dtype
            or self.variance_size_override is not None
            or x.size(-1) % _NORM_MULTIPLE
        ):
            by_torch: torch.Tensor = self.forward_native(x, residual)
            return by_torch
        x = x.contiguous()  # the kernels take no strides and do not say so
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, weight, self.variance_epsilon)
            return out
        residual = residual.contiguous()
        torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)  # in place
        return x, residual

    RMSNorm.forward_cpu = forward_cpu


def _attention_without_dispatcher() -> None:
    from vllm.model_executor.layers.attention.attention import Attention

    original = Attention.__init__

    def __init__(self: Attention, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.use_direct_call = True  # a custom op is of use to a compiler only

    Attention.__init__ = __init__


def _plain_experts_directly() -> None:
    from vllm._custom_ops import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    original = MoERunner.forward

    def forward(
        self: MoERunner, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not _is_plain(self):
            by_runner: torch.Tensor = original(self, hidden_states, *args, **kwargs)
            return by_runner
        layer = self.routed_experts
        router = self.router
        kernel = layer.quant_method.moe_kernel.fused_experts
        logits, _ = self.gate(hidden_states)
        weights, ids = router.select_experts(hidden_states, logits)
        out = torch.empty_like(hidden_states)
        cpu_fused_moe(
            out,
            hidden_states,
            layer.w13_weight,
            layer.w2_weight,
            kernel.w1_bias,
            kernel.w2_bias,
            weights,
            ids,
            layer.activation.value,
            kernel.isa,
        )
        return out

    MoERunner.forward = forward


@cache
def _is_plain(runner: MoERunner) -> bool:
    """Tell whether gate, top-k and one kernel are all there is to this layer; decided once."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    config = runner.moe_config
    layer = runner.routed_experts
    kernel = getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None)
    parts = (
        runner._shared_experts,
        runner.shared_expert_gate,
        runner.routed_input_transform,
        runner.routed_output_transform,
        runner.router.eplb_state,
        layer.expert_map,
    )
    sizes = (config.tp_size, config.ep_size, config.dp_size, config.pcp_size)
    return (
        type(runner) is MoERunner
        and type(runner.router) is CPURouter
        and isinstance(kernel, CPUUnquantizedExperts)
        and not kernel._use_zentorch
        and runner.gate is not None
        and all(part is None for part in parts)
        and set(sizes) == {1}
        and not config.is_sequence_parallel
        and runner.routed_scaling_factor == 1.0
        and not layer.apply_router_weight_on_input
        and config.hidden_dim == config.hidden_dim_unpadded
    )
