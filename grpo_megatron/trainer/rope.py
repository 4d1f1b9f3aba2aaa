"""Rotary frequencies of every scaling that the families use, by transformers' own functions.

Megatron-Core 0.16.1 knows Llama 3's scaling with one set of constants only, and YaRN outside
latent attention only through attributes that its configuration does not have.
"""

from typing import Any

import torch


def rotary(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, fp32 [rotated size / 2], and the factor of cosines and sines.

    Args:
        rope: as `plan.hf_config.rope_fields` gives it."""
    if rope["type"] == "default":
        size = int(head_dim * rope["percent"])
        return 1.0 / rope["theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    from transformers import LlamaConfig  # takes a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = {"type": "rope_type", "theta": "rope_theta", "percent": "partial_rotary_factor"}
    given = {names.get(name, name): v for name, v in rope.items() if v or v is False}  # 0: unset
    config = LlamaConfig(head_dim=head_dim, rope_parameters=given)
    return ROPE_INIT_FUNCTIONS[rope["type"]](config, torch.device("cpu"))
