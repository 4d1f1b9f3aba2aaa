"""`[trainer]`, `[optimizer]`: Megatron-Core layout, precision, memory, optimizer."""

import math
from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError

FP8_ROWS = 16
"""Rows of an FP8 matrix product come in multiples of this (Transformer Engine)."""
LAYOUT_KEYS = (
    "num_ranks",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "first_stage_layers",
    "last_stage_layers",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_threads",
)
"""Keys of [trainer] that say how ranks share a model and a machine, and not how it is computed."""


def refuse_other_than_layout(key: str, *, where: str) -> None:
    """Raise ConfigError for a key that is not in `LAYOUT_KEYS`."""
    if key in LAYOUT_KEYS:
        return
    near = nearest(key, LAYOUT_KEYS) or ["tensor_parallel_size"]
    raise ConfigError(
        f"{key!r} is no key of a layout of ranks",
        where=where,
        remedy=f"for example {near[0]}=2; keys are {', '.join(LAYOUT_KEYS)}",
    )


class TrainerConfig(Strict):
    """Parallel layout: `num_ranks = tensor * pipeline * context * data`."""

    num_ranks: int = Field(1, ge=1)
    """Trainer processes (one per GPU on a cluster)."""
    tensor_parallel_size: int = Field(1, ge=1)
    """TP: splits attention heads, MLP and vocabulary."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """PP: splits layers."""
    first_stage_layers: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage, where not all have equally many."""
    last_stage_layers: int | None = Field(None, ge=1)
    """Layers of the last pipeline stage, where not all have equally many."""
    virtual_pipeline_parallel_size: int | None = Field(None, ge=2)
    """VPP: model chunks per pipeline rank."""
    context_parallel_size: int = Field(1, ge=1)
    """CP: splits rows of tokens (docs/context-parallelism.md), and so activations and work."""
    expert_parallel_size: int = Field(1, ge=1)
    """EP: splits experts over ranks."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """ETP: tensor parallelism within an expert; default: the tensor parallel size."""
    sequence_parallel: bool | None = None
    """SP with TP; default: on whenever `tensor_parallel_size > 1`."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    offload_optimizer: bool = False
    """Keep Adam's moments and float32 weights in the memory of the host and update there: GPUs hold
    none of them, an optimizer step waits for the CPU. Where there is no GPU nothing moves."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations; log-probs and router are always float32."""
    fp8: Literal["none", "blockwise"] = "none"
    """Matrix products of the layers in FP8 with a scale for every block (GPUs with Transformer
    Engine); parameters and gradients keep their precision."""
    attention: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Who computes attention on GPUs; 'auto': Transformer Engine where it was seen to be right,
    which it was not for latent attention (docs/kernels.md)."""
    moe_dispatcher: Literal["auto", "alltoall", "deepep", "hybridep"] = "auto"
    """How tokens reach their experts' ranks; 'auto': the fastest that is installed."""
    overlap_communication: bool | None = None
    """Reduce gradients during the backward and gather weights during the next forward; default: on
    GPUs. The gather is over before weights are published, saved, exported or exchanged."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation; 'full' recomputes the blocks of a trained vision tower, too."""
    vision_tower: Literal["frozen", "trained"] = "frozen"
    """Of a model that sees: whether its vision tower stays as it is or is trained with the rest, at
    the same learning rate (docs/vision.md)."""
    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Packed tokens per micro-batch and data-parallel rank; context-parallel ranks share them."""
    share_prefixes: bool = True
    """Compute a prompt once for all of its samples in a micro-batch (docs/shared-prefixes.md): less
    work, the same loss and gradients. It is off, and the log says so, where it would not be exact:
    when routing.router_policy is 'none' and the model has a selection bias."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose full-vocabulary logits exist at one time."""
    keep_logits: bool = False
    """Keep the logits of a micro-batch for its backward, in `precision`, instead of computing them
    twice: faster, the same numbers, and max_tokens_per_microbatch x vocabulary / TP more memory."""
    num_threads: int | None = Field(None, ge=1)
    """CPU: threads a rank; default: cores divided by ranks."""
    command_timeout_s: float = Field(1800.0, gt=0)
    """How long one trainer command may take."""
    max_restarts: int = Field(3, ge=0)
    """Times that training is started again within the run, from the newest checkpoint, when a rank
    was killed, crashed or hung, each time after twice the pause; engines go on serving
    (docs/faults.md). An error of its own, such as a loss that is no number, ends the run at once;
    0: so does every death. Not where engines share GPUs with the trainer."""

    @property
    def attention_ranks(self) -> int:
        """Ranks that hold one copy of the attention weights: TP x PP x CP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of the experts: ETP x EP x PP."""
        return self.etp * self.expert_parallel_size * self.pipeline_parallel_size

    @property
    def dp(self) -> int:
        """Data-parallel ranks: copies of the attention weights."""
        return self.num_ranks // self.attention_ranks

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of an expert."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def token_multiple(self) -> int:
        """What the packed tokens of a micro-batch are padded to a multiple of."""
        multiple = self.tensor_parallel_size * self.context_parallel_size
        if self.fp8 != "none":
            multiple *= FP8_ROWS
        return multiple

    @property
    def sp(self) -> bool:
        """Whether sequences are split over the tensor-parallel ranks."""
        if self.sequence_parallel is None:
            return self.tensor_parallel_size > 1
        return self.sequence_parallel


class OptimizerConfig(Strict):
    """AdamW with warm-up and decay."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over `num_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam: decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam: decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Adam: added to the root of the second moment."""
    clip_grad: float = Field(1.0, ge=0)
    """Clip the global gradient norm; 0: off."""

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step` (from 0) of `num_steps`; nothing to store or to resume."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(num_steps - self.warmup_steps, 1)
        progress = min(max(progress, 0.0), 1.0)
        factor = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.schedule]
        return self.min_lr + (self.lr - self.min_lr) * factor
