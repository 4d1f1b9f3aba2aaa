"""Optimizer state in the memory of the host: Megatron-Core's HybridDeviceOptimizer, all of it.

A rank's shard of the float32 weights and of Adam's moments is on the host, where torch's fused
AdamW updates it, one optimizer for each weight. Gradients go there and weights come back on streams
beside each other. The outer optimizer has the groups and the state that Megatron sees; before each
step the inner ones get the groups' settings, after it their state is the outer one's."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

SETTINGS: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    # Megatron then leaves float32 weights to the inner optimizers, and gradients where they are.
    "use_precision_aware_optimizer": True,
}
"""Of Megatron's OptimizerConfig. It takes bfloat16 weights and the distributed optimizer."""


def is_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer inside of a Megatron optimizer has its state on the host."""
    return isinstance(optimizer, HybridDeviceOptimizer)


def class_of_state(optimizer: torch.optim.Optimizer) -> type:
    """Return the class that holds the moments."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        kind: type = optimizer.cpu_optimizer_cls
        return kind
    return type(optimizer)


def create_state(optimizer: HybridDeviceOptimizer) -> None:
    """Give the inner optimizers that have not stepped yet the state of some that have, and the
    outer one theirs."""
    for inner in optimizer.sub_optimizers:
        for group in inner.param_groups:
            for weight in group["params"]:
                if not inner.state[weight]:
                    inner.state[weight].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(weight),
                        exp_avg_sq=torch.zeros_like(weight),
                    )
    optimizer._sync_sub_optimizers_state_to_hdo()


def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop moments and counts of steps; float32 weights stay."""
    optimizer.state.clear()
    if isinstance(optimizer, HybridDeviceOptimizer):
        for inner in optimizer.sub_optimizers:
            inner.state.clear()
