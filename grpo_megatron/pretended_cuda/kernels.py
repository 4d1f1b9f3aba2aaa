"""Kernels that torch has for CUDA only, made of other operations. All of them take and give tensors
of the host: what the tensors on a device hold."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten: Any = torch.ops.aten


def rms_norm(
    values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`values / rms(values) * weight`, and `1 / rms`, over the last `len(shape)` dimensions."""
    dims = _last(shape)
    wide = values.float()
    if eps is None:
        eps = torch.finfo(values.dtype).eps
    inverse = torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    normed = wide * inverse
    if weight is not None:
        normed = normed * weight
    return normed.to(values.dtype), inverse


def rms_norm_backward(
    grad: torch.Tensor,
    values: torch.Tensor,
    shape: Sequence[int],
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `rms_norm` by values and weight; `wanted` says which of them.

    Rounded as on a CPU, where autograd goes back through the operations of the formula."""
    dims = _last(shape)
    wide = values.float()
    by_normed = grad.float()
    grad_weight = None
    if weight is not None:
        if wanted[1]:
            others = tuple(range(values.dim() - len(shape)))
            grad_weight = (by_normed * (wide * inverse)).sum(others).to(weight.dtype)
        by_normed = by_normed * weight
    grad_values = None
    if wanted[0]:
        by_inverse = (by_normed * wide).sum(dims, keepdim=True)
        by_mean = -0.5 * by_inverse * inverse.pow(3)
        by_square = by_mean.expand_as(wide) / math.prod(shape)
        grad_values = (by_normed * inverse + by_square * (2 * wide)).to(values.dtype)
    return grad_values, grad_weight


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the CPU's flash attention, with empty places for what only CUDA's returns."""
    found, log_sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout, is_causal, scale=scale
    )
    nothing = query.new_empty(0)
    state = torch.empty(2, dtype=torch.int64)
    lengths = (query.size(2), key.size(2))
    return (found, log_sums, nothing, nothing, *lengths, state, nothing, nothing)


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    found: torch.Tensor,
    log_sums: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    is_causal: bool,
    *random_state: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `flash_attention` by query, key and value."""
    gradients: tuple[torch.Tensor, ...]
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, query, key, value, found, log_sums, dropout, is_causal, scale=scale
    )
    return gradients


def _last(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
}
