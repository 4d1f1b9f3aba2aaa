"""`[trainer]`, `[optimizer]`: Megatron-Core layout, precision, memory, optimizer."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class TrainerConfig(Strict):
    """Parallel layout: `num_ranks = tensor * pipeline * context * data`."""

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
    def etp(self) -> int:
        """Expert tensor parallel size, resolved."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def sp(self) -> bool:
        """Sequence parallelism, resolved."""
        chosen = self.sequence_parallel
        return self.tensor_parallel_size > 1 if chosen is None else chosen


class OptimizerConfig(Strict):
    """AdamW with warm-up and decay."""

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)
