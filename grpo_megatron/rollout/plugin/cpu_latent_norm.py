"""CPU: norms of latent vectors have the epsilon of the published models.

Defect (vLLM 0.32.0, models/deepseek_v2.py, `DeepseekV2MLAAttention` and `DeepseekV2Attention`):
they take `rms_norm_eps`. transformers, and the trainer without Transformer Engine
(`trainer.megatron.layer_specs.LatentNorm`), fix it at 1e-6, which differs for Moonlight (1e-5).
With Transformer Engine the trainer takes `rms_norm_eps` too, so a GPU keeps what vLLM does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention

EPSILON = 1e-6


def apply() -> None:
    """Let both attention classes make their latent norms with `EPSILON`."""
    from vllm.model_executor.models import deepseek_v2

    for cls in (deepseek_v2.DeepseekV2MLAAttention, deepseek_v2.DeepseekV2Attention):
        cls.__init__ = _with_epsilon(cls.__init__)


def _with_epsilon(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: DeepseekV2MLAAttention, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.kv_a_layernorm.variance_epsilon = EPSILON
        if self.q_lora_rank is not None:
            self.q_a_layernorm.variance_epsilon = EPSILON

    return __init__
