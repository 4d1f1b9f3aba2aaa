"""Rotary embedding of packed sequences, on torch.

The angles of all packed tokens are the same in every layer, for queries and for keys: they are
gathered once per micro-batch. The rotation's gradient is the rotation back (times the scale), so
nothing but cosines and sines is kept.
"""

import torch


def rotate_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor,
                  scale: float = 1.0) -> torch.Tensor:
    """Rotate the two halves of the leading `freqs.size(-1)` features of every head.

    Args:
        x: queries or keys, [T, heads, d], as is the result.
        cu_seqlens: int32 [S + 1]; the angles are kept on it.
        freqs: angles by position, [longest, 1, 1, rotary d], both halves equal.
        scale: factor of cosines and sines (YaRN); one value for the same `freqs`."""
    kept = getattr(cu_seqlens, "rope", None)
    if kept is None or kept[0] is not freqs or kept[1].dtype != x.dtype:
        angles = freqs[_positions(cu_seqlens, x.size(0)), 0, :, :freqs.size(-1) // 2]
        kept = cu_seqlens.rope = (freqs, (angles.cos() * scale).to(x.dtype),
                                  (angles.sin() * scale).to(x.dtype))
    return _Rotation.apply(x, kept[1], kept[2])


def _positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Position of every packed token within its sequence, int64 [T]."""
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = x[..., :half], x[..., half:2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:2 * half]).addcmul_(a, sin, value=sign)
    out[..., 2 * half:] = x[..., 2 * half:]
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, -1), None, None
