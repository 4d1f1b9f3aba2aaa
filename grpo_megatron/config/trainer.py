"""`[trainer]`, `[optimizer]`: Megatron-Core layout, precision, memory, optimizer."""

import math
from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class TrainerConfig(Strict):
    num_ranks: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    first_stage_layers: int | None = Field(None, ge=1)
    last_stage_layers: int | None = Field(None, ge=1)
    virtual_pipeline_parallel_size: int | None = Field(None, ge=2)
    context_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    sequence_parallel: bool | None = None
    distributed_optimizer: bool = True
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    max_tokens_per_microbatch: int = Field(8192, ge=1)
    logprob_chunk_tokens: int = Field(1024, ge=1)
    num_threads: int | None = Field(None, ge=1)
    command_timeout_s: float = Field(1800.0, gt=0)

    @property
    def attention_ranks(self) -> int:
        """That hold one copy of the attention weights: TP x PP x CP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """That hold one copy of the experts: ETP x EP x PP."""
        return self.etp * self.expert_parallel_size * self.pipeline_parallel_size

    @property
    def dp(self) -> int:
        return self.num_ranks // self.attention_ranks

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def sp(self) -> bool:
        chosen = self.sequence_parallel
        return self.tensor_parallel_size > 1 if chosen is None else chosen


class OptimizerConfig(Strict):
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step` (from 0) of `num_steps`; nothing to store or to resume."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(num_steps - self.warmup_steps, 1)
        progress = min(max(progress, 0.0), 1.0)
        factor = {"constant": 1.0, "linear": 1 - progress,
                  "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[self.schedule]
        return self.min_lr + (self.lr - self.min_lr) * factor
