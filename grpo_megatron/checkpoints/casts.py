"""Weights in another dtype."""

import torch

from grpo_megatron.errors import CheckpointError


def cast(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    where: str,
    remedy: str = "choose bfloat16 or float32",
) -> torch.Tensor:
    """Return a tensor as `dtype`; where: what messages call the place of the choice. Raises
    CheckpointError where a finite number becomes infinite."""
    if tensor.dtype == dtype:
        return tensor
    largest = torch.zeros(())
    if tensor.numel():
        largest = tensor.abs().max()
    if torch.isfinite(largest) and not torch.isfinite(largest.to(dtype)):
        raise CheckpointError(
            f"{name} has numbers up to {float(largest):.3g}, which {dtype} cannot hold "
            f"({torch.finfo(dtype).max:.3g} is its largest)",
            where=where,
            remedy=remedy,
        )
    return tensor.to(dtype)
