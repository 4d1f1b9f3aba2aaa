"""Rotary embedding: frequencies of every scaling that the families use, by transformers' own
functions, and the rotation of packed sequences.

What Megatron-Core lacks: docs/findings.md. Angles of packed tokens are gathered once per
micro-batch; the rotation's gradient is the rotation back, so only they are kept."""

from typing import Any

import torch


def rotary(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, fp32 [rotated size / 2]; factor of cos and sin. rope: `rope_fields`."""
    if rope["type"] == "default":
        size = int(head_dim * rope["percent"])
        return 1.0 / rope["theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    from transformers import LlamaConfig  # takes a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = {"type": "rope_type", "theta": "rope_theta", "percent": "partial_rotary_factor"}
    given = {names.get(name, name): v for name, v in rope.items() if v or v is False}  # 0: unset
    config = LlamaConfig(head_dim=head_dim, rope_parameters=given)
    return ROPE_INIT_FUNCTIONS[rope["type"]](config, torch.device("cpu"))


def rotate_packed(
    x: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Rotate the two halves of the leading `freqs.size(-1)` features of every head.

    x: queries or keys, [T, heads, d], as is the result; cu_seqlens: int32 [S + 1], the angles are
    kept on it; freqs: angles by position, [longest, 1, 1, rotary d], both halves equal; scale:
    factor of cosines and sines (YaRN), one value for the same `freqs`."""
    kept = getattr(cu_seqlens, "rope", None)
    if kept is None or kept[0] is not freqs or kept[1].dtype != x.dtype:
        starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=x.size(0))
        positions = torch.arange(x.size(0), device=starts.device) - starts
        angles = freqs[positions, 0, :, : freqs.size(-1) // 2]
        kept = cu_seqlens.rope = (
            freqs,
            (angles.cos() * scale).to(x.dtype),
            (angles.sin() * scale).to(x.dtype),
        )
    return _Rotation.apply(x, kept[1], kept[2])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin, value=sign)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, -1), None, None
