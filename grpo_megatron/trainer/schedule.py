"""Learning rate as a closed form of the step: nothing to store, nothing to resume wrongly."""

import math

from grpo_megatron.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) of `num_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    factor = {"constant": 1.0, "linear": 1 - progress,
              "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * factor
