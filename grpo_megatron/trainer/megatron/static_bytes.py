"""Bytes that a built policy holds from start to end, counted on its own tensors."""

from dataclasses import dataclass
from typing import Any

import torch

from grpo_megatron.trainer.megatron.policy import Policy


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of a rank by part, and the sizes of its parameters."""

    weights: int
    gradients: int
    optimizer: int
    """Adam's moments, and float32 weights where the model's are not; no step counters."""
    buffers: int
    shapes: tuple[tuple[int, ...], ...]
    """Elements of every parameter, by model chunk."""
    host: int = 0
    """Of an optimizer whose state is in the memory of the host, which is not in `optimizer`."""
    adapters: int = 0
    """Of the copies that lie beside the policy where domains have adapters of their own."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, as the plan names them."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
        }
        if self.adapters:
            parts["adapters"] = self.adapters
        return parts


def static_bytes_of(policy: Policy) -> StaticBytes:
    """Count what `build_policy` and `create_adam_state` have made."""
    _keep_expert_biases_whole(policy)
    weights = 0
    gradients = 0
    for buffer in _gradient_buffers(policy):
        gradients += _size(buffer.grad_data)
        if buffer.param_data is not None:
            weights += _size(buffer.param_data)
    shapes = []
    module_buffers = 0
    for chunk in policy.chunks:
        are_mapped = any(buffer.param_data is not None for buffer in _buffers_of(chunk))
        of_chunk = []
        for parameter in chunk.module.parameters():
            of_chunk.append(parameter.numel())
            if not (are_mapped and parameter.requires_grad):
                weights += _size(parameter)
        shapes.append(tuple(of_chunk))
        module_buffers += sum(_size(buffer) for buffer in chunk.module.buffers())
    of_optimizer = _optimizer_bytes(policy)
    on_host = 0
    if policy.has_optimizer_on_host():
        on_host = of_optimizer
        of_optimizer = 0
    return StaticBytes(
        weights, gradients, of_optimizer, module_buffers, tuple(shapes), host=on_host
    )


def _keep_expert_biases_whole(policy: Policy) -> None:
    """Do what the first forward pass does: biases of routers are float32 from then on."""
    for chunk in policy.chunks:
        for module in chunk.module.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()


def _buffers_of(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _gradient_buffers(policy: Policy) -> list[Any]:
    found = []
    for chunk in policy.chunks:
        found += _buffers_of(chunk)
    return found


def _optimizer_bytes(policy: Policy) -> int:
    """Return bytes of moments, and of float32 weights beside bfloat16 ones."""
    total = 0
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        if part.optimizer is None:  # of experts, on a rank without any
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if policy.config.bf16 and parameter.dtype == torch.float32:
                    total += _size(parameter)
        for state in part.optimizer.state.values():
            for name, tensor in state.items():
                if name != "step":
                    total += _size(tensor)
    return total


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
