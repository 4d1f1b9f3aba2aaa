"""Layers of DeepSeek's family keep whole sequences beside data-parallel engines.

Defect (vLLM 0.32.0, models/deepseek_v2.py:1356, `DeepseekV2DecoderLayer.forward`): with several
data-parallel engines, tensor and expert parallelism, a layer leaves each tensor-parallel worker
with a part of the tokens, and the next one tells by the number of rows whether it was given a part.
One token is a part of one row: the workers go on with their own row each, all but the first with
one of zeros, and log-probs of whatever an engine samples alone are wrong.

Experts still take parts of the tokens, as those of Qwen3-MoE do; they are gathered behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer


def apply() -> None:
    """Let attention add up its output for all workers, and layers pass whole sequences on."""
    from vllm.model_executor.models import deepseek_v2

    original = deepseek_v2.DeepseekV2DecoderLayer.__init__

    def __init__(self: DeepseekV2DecoderLayer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_sequence_parallel_moe:
            self.use_sequence_parallel_moe = False
            self.self_attn.o_proj.reduce_results = True

    deepseek_v2.DeepseekV2DecoderLayer.__init__ = __init__
