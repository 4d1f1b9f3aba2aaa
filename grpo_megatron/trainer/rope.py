"""Rotary frequencies of every scaling that the families use.

Megatron-Core 0.16.1 knows Llama 3's scaling with one set of constants only, and YaRN outside
latent attention only through attributes that its configuration does not have.
"""

import math
from typing import Any

import torch


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """fp32 [rotated size / 2]; `rope` as `plan.hf_config.rope_fields` gives it."""
    size = int(head_dim * rope["percent"])
    plain = 1.0 / rope["theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope["type"] == "default":
        return plain
    slow = plain / rope["factor"]
    if rope["type"] == "linear":
        return slow
    ramp = _llama3_ramp(rope, plain) if rope["type"] == "llama3" else _yarn_ramp(rope, size)
    return torch.lerp(plain, slow, ramp)


def attention_factor(rope: dict[str, Any]) -> float:
    """Factor of cosines and sines (YaRN, arXiv 2309.00071, section 3.4)."""
    if rope["type"] != "yarn":
        return 1.0

    def scale(weight: float) -> float:
        return max(1.0, 0.1 * weight * math.log(rope["factor"]) + 1.0)

    if rope["attention_factor"]:
        return rope["attention_factor"]
    if rope["mscale"] and rope["mscale_all_dim"]:
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _llama3_ramp(rope: dict[str, Any], frequencies: torch.Tensor) -> torch.Tensor:
    """0 where a wave fits often enough into the original context, 1 where too seldom."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    return 1.0 - ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_ramp(rope: dict[str, Any], size: int) -> torch.Tensor:
    """0 for fast dimensions, 1 for slow ones, linear between the two betas."""
    def dimension(turns: float) -> float:
        context = rope["original_max_position_embeddings"]
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope["theta"]))

    first, last = dimension(rope["beta_fast"]), dimension(rope["beta_slow"])
    if rope["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    return ((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
