"""Which kernels of torch's own layers a trace takes: a GPU's fused ones, or a CPU's.

On the meta device torch takes attention apart into a matrix of scores, and norms into float32
steps, which is what neither keeps."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu

from grpo_megatron.trace.mode import TraceMode
from grpo_megatron.trainer.megatron import layer_specs
from grpo_megatron.trainer.megatron.packed_attention import PackedAttention
from grpo_megatron.trainer.megatron.transformer_engine_attention import with_gathered_keys

aten = torch.ops.aten
_LARGEST_FLASH_HEAD = 256


@contextmanager
def fused_kernels(*, on_gpu: bool, gathers_keys: bool = False) -> Iterator[None]:
    """Let attention, and on a GPU RMS norms, keep what the device's kernels keep.

    gathers_keys: from context-parallel ranks, as Transformer Engine's attention gets them."""
    with ExitStack() as stack:
        attention: Any = _cpu_attention
        if on_gpu:
            attention = _gpu_attention
            stack.enter_context(mock.patch.object(F, "rms_norm", _gpu_norm))
        if on_gpu and gathers_keys:
            kernel = with_gathered_keys(_OneKernel)
            stack.enter_context(mock.patch.object(layer_specs, "PackedAttention", kernel))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        yield


@contextmanager
def compiled_kernels(mode: TraceMode) -> Iterator[None]:
    """Let what torch compiles for a GPU hold nothing in between, here where it is not compiled."""
    with ExitStack() as stack:
        for name in _COMPILED:
            function = mode.in_one_kernel(getattr(fused_bias_swiglu, name))
            stack.enter_context(mock.patch.object(fused_bias_swiglu, name, function))
        adam = mode.in_one_kernel(torch.optim.AdamW.step)
        stack.enter_context(mock.patch.object(torch.optim.AdamW, "step", adam))
        yield


_COMPILED = (
    "swiglu",
    "bias_swiglu",
    "weighted_swiglu",
    "swiglu_back",
    "bias_swiglu_back",
    "weighted_swiglu_back",
)


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention, or, where it has none for the type or the sizes, the memory-efficient."""
    found: torch.Tensor
    size = query.size(-1)
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if is_half and size == value.size(-1) and size <= _LARGEST_FLASH_HEAD:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
        return found
    if enable_gqa:
        repeats = query.size(1) // key.size(1)
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    needs_gradient = torch.is_grad_enabled()
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, needs_gradient, 0.0, is_causal, scale=scale
    )[0]
    return found


class _OneKernel(PackedAttention):
    """Attention of all sequences in one call, as Transformer Engine's."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        enable_gqa = q.size(1) != k.size(1)
        found = _gpu_attention(q, k, v, is_causal=False, scale=self.scale, enable_gqa=enable_gqa)
        return found[0].transpose(0, 1).flatten(1)


_scaled_dot_product_attention = F.scaled_dot_product_attention


def _cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the CPU's flash attention; none where keys and values differ in size."""
    found: torch.Tensor
    if query.size(-1) == value.size(-1):
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return found
    found = _scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return found


def _gpu_norm(
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    found: torch.Tensor = _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return found


class _FusedNorm(torch.autograd.Function):
    """Shapes of `aten._fused_rms_norm`, which torch takes apart for the meta device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inverse_root = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, inverse_root, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
