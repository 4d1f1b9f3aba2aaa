"""What an adapter adds to a weight, and the weight with it."""

import torch


def low_rank_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `scale B A`, fp32 [out, in]. a: [rank, in]; b: [out, rank]."""
    return (b.detach().float() @ a.detach().float()) * scale


def exact_sum(weight: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return `weight + addend` in fp32, for who rounds it himself."""
    return weight.detach().float() + addend


def merged(weight: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return `weight + addend` in the dtype of the weight, computed in fp32 and rounded once.

    The weight stays as it is, so that merging again and again cannot drift."""
    return exact_sum(weight, addend).to(weight.dtype)


def row_norms(weight: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Return `||W + scale B A||` of each whole row: fp32 [out], rounded as the weight is, for so is
    the magnitude that begins as it. product: of `low_rank_product`."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight.detach().float() + product, dim=1)
    return norms.to(weight.dtype).float()


def addend_of_dora(
    weight: torch.Tensor, product: torch.Tensor, magnitude: torch.Tensor, norms: torch.Tensor
) -> torch.Tensor:
    """Return what DoRA (arXiv:2402.09353) adds to a weight: fp32 [out, in].

    magnitude, norms: [out], see `row_norms`; of the weight there may be some columns only."""
    base = weight.detach().float()
    factors = magnitude.detach().float() / norms
    return (base + product) * factors[:, None] - base
