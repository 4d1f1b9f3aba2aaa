"""Kernels that torch has for CUDA only, made of other operations. All of them take and give tensors
of the host: what the tensors on a device hold."""

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
    """Gradients of `rms_norm` by values and weight; `wanted` says which of them."""
    dims = _last(shape)
    normed = values.float() * inverse
    by_normed = grad.float()
    by_weight = by_normed * normed
    if weight is not None:
        by_normed = by_normed * weight
    grad_values = None
    if wanted[0]:
        along = (by_normed * normed).mean(dims, keepdim=True)
        grad_values = ((by_normed - normed * along) * inverse).to(values.dtype)
    grad_weight = None
    if wanted[1] and weight is not None:
        others = tuple(range(values.dim() - len(shape)))
        grad_weight = by_weight.sum(others).to(weight.dtype)
    return grad_values, grad_weight


def _last(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}
