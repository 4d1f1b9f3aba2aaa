"""The head of a reward model, in the place of the output layer, or of a critic, beside it."""

from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from torch.nn.functional import linear

_STD = 0.02


class RewardHead(torch.nn.Module):
    """`w · state` for each of K scalars, in float32. Every tensor rank has all of it; its first
    weights depend on `seed` alone."""

    def __init__(self, hidden_size: int, num_scalars: int, dtype: torch.dtype, seed: int):
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        weight = torch.randn(num_scalars, hidden_size, generator=generator, device="cpu") * _STD
        self.weight = torch.nn.Parameter(weight.to(dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scalars of states, [n, H]: fp32 [K, n]."""
        shared: torch.Tensor = _DividedGradient.apply(states)  # type: ignore[no-untyped-call]
        return linear(shared.float(), self.weight.float()).T


class _DividedGradient(torch.autograd.Function):
    """The states are gathered for a layer that tensor ranks split, so that their gradients are
    added up over these ranks: here each rank has the whole gradient."""

    @staticmethod
    def forward(context: Any, states: torch.Tensor) -> torch.Tensor:
        return states

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        divided: torch.Tensor = gradient / get_tensor_model_parallel_world_size()
        return divided
