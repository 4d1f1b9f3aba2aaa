"""Rotary embedding: frequencies of every scaling that the families use, by transformers' own
functions, and the rotation of packed sequences.

What Megatron-Core lacks: docs/findings.md. Angles of packed tokens are gathered once per
micro-batch; the rotation's gradient is the rotation back, so only they are kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from grpo_megatron.trainer.megatron.row_context import row_of


def rotary(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Compute inverse frequencies, fp32 [rotated size / 2], and the factor of cosines and sines.

    rope: the result of `plan.hf_config.rope_fields`."""
    if rope["type"] in ("default", "mrope"):
        size = int(head_dim * rope["percent"])
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / rope["theta"] ** exponents, 1.0
    from transformers import LlamaConfig  # takes a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = {"type": "rope_type", "theta": "rope_theta", "percent": "partial_rotary_factor"}
    given = {}
    for name, value in rope.items():
        is_set = value or value is False  # 0: unset
        if is_set:
            given[names.get(name, name)] = value
    config = LlamaConfig(head_dim=head_dim, rope_parameters=given)
    frequencies: torch.Tensor
    factor: float
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["type"]](config, torch.device("cpu"))
    return frequencies, factor


def axes_of(rope: dict[str, Any]) -> tuple[slice, slice] | None:
    """Say which angles of a head go by positions in height and which by those in width; the others
    go by those in time. None for a model whose tokens have one position.

    rope: the result of `plan.hf_config.rope_fields`. Sections lie one after the other, or are
    interleaved: time, height, width, time, ... as long as one has angles left, as in transformers'
    Qwen3-VL."""
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    in_time, in_height, in_width = sections
    if rope.get("mrope_interleaved"):
        return slice(1, 3 * in_height, 3), slice(2, 3 * in_width, 3)
    in_both = in_time + in_height
    return slice(in_time, in_both), slice(in_both, in_both + in_width)


class Angles(NamedTuple):
    """Those of the tokens of a row."""

    freqs: torch.Tensor  # of which these are
    cos: torch.Tensor  # [T, 1, rotary d / 2], as `sin`
    sin: torch.Tensor


def rotate_packed(
    x: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Rotate the two halves of the leading `freqs.size(-1)` features of every head.

    x: queries or keys, [T, heads, d], as is the result. cu_seqlens: int32 [S + 1], whose
    `RowContext` says where tokens are in their samples, and keeps the computed angles. freqs:
    angles by position, [longest, 1, 1, rotary d], both halves equal. scale: factor of cosines and
    sines (YaRN), one value for the same `freqs`."""
    row = row_of(cu_seqlens)
    found = row.angles
    if found is None or found.freqs is not freqs or found.cos.dtype != x.dtype:
        positions = row.positions
        if positions is None:
            starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=x.size(0))
            positions = torch.arange(x.size(0), device=starts.device) - starts
        angles = _angles_at(positions, freqs, row.axes)
        cos = (angles.cos() * scale).to(x.dtype)
        sin = (angles.sin() * scale).to(x.dtype)
        found = Angles(freqs, cos, sin)
        row.angles = found
    rotated: torch.Tensor = _Rotation.apply(  # type: ignore[no-untyped-call]  # torch's
        x, found.cos, found.sin
    )
    return rotated


def _angles_at(
    positions: torch.Tensor, freqs: torch.Tensor, axes: Sequence[slice] | None
) -> torch.Tensor:
    """Return angles of tokens at positions, int64 [T] or [3, T]: [T, 1, rotary d / 2]."""
    half = freqs[:, 0, :, : freqs.size(-1) // 2]
    if positions.dim() == 1:
        return half[positions]
    assert axes is not None  # of a model whose tokens have three positions
    in_time, *in_space = positions
    angles = half[in_time]
    for on_axis, of_axis in zip(in_space, axes, strict=True):
        angles[..., of_axis] = half[..., of_axis][on_axis]
    return angles


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate by the angles, or with `sign` -1 back; features beyond them stay as they are."""
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first = x[..., :half]
    second = x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=sign)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Rotation(torch.autograd.Function):
    """`_rotate`, of which only the angles are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None
