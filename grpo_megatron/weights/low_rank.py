"""What an adapter adds to a weight, and the weight with it."""

import torch


def low_rank_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `scale B A`, fp32 [out, in]. a: [rank, in]; b: [out, rank]."""
    return (b.detach().float() @ a.detach().float()) * scale


def merged(weight: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return `weight + addend` in the dtype of the weight, computed in fp32 and rounded once.

    The weight stays as it is, so that merging again and again cannot drift."""
    return (weight.detach().float() + addend).to(weight.dtype)
