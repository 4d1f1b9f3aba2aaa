"""Routes of a trace: every expert gets as many tokens as any other."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


@contextmanager
def balanced_routes() -> Iterator[None]:
    """Let Megatron's dispatcher count tokens of balanced routes inside of the block.

    What routers choose is not known in a trace, and counts of tokens decide shapes. Everything
    else follows what the routers gave."""
    original = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        num_tokens, num_experts = routing_map.shape
        counted = _balanced_map(num_tokens, num_experts, self.config.moe_router_topk)
        found: torch.Tensor = original(self, counted)
        return found

    with mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", preprocess):
        yield


@cache
def _balanced_map(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Bool [T, E]: token after token takes the next `top_k` experts."""
    slots = torch.arange(num_tokens * top_k, device="cpu").view(num_tokens, top_k)
    found = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device="cpu")
    return found.scatter_(1, slots % num_experts, True)
