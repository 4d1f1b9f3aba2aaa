"""Block-quantised fp8 checkpoints (DeepSeek-V3, Kimi-K2): one scale per 128 x 128 block."""

import torch

BLOCK = 128


def scale_name(name: str) -> str:
    """Name of the scales that go with a weight."""
    return name + "_scale_inv"


def dequantise(weight: torch.Tensor, scale_inv: torch.Tensor,
               dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weight times the scale of its block, in fp32, rounded once. Extra memory: one block row.

    Args:
        weight: float8_e4m3fn [rows, columns].
        scale_inv: fp32 [ceil(rows / 128), ceil(columns / 128)]; ValueError for others."""
    rows, columns = weight.shape
    wanted = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale_inv.shape) != wanted:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} has scales of shape {wanted}, "
                         f"not {tuple(scale_inv.shape)}")
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for index, scales in enumerate(scale_inv.float()):
        block = slice(index * BLOCK, (index + 1) * BLOCK)
        out[block] = weight[block].float() * scales.repeat_interleave(BLOCK)[:columns]
    return out
