"""What context-parallel ranks tell each other: keys and values, and what they found on their own
policy tokens.

Ranks of a group compute parts of the same rows (`batching.row_split`). Behind the model every one
of them has the log-probs of whole samples, so that nothing there needs to know of the split; a
gradient goes back to the rank whose token it is, and the sum over ranks is that of one rank.

Shape legend: T packed tokens, C context-parallel ranks, n policy tokens, m those of this rank."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from grpo_megatron.trainer.vocab_parallel.logprobs import KeptIds


@dataclass(frozen=True)
class ContextRank:
    """The place of this process among the ranks that compute the same rows."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_this_process(cls) -> Self:
        """Ask Megatron's groups."""
        return cls(
            int(parallel_state.get_context_parallel_rank()),
            int(parallel_state.get_context_parallel_world_size()),
        )


@dataclass(frozen=True)
class OwnTokens:
    """The policy tokens of a micro-batch whose log-probs this rank computes."""

    predicting: torch.Tensor
    """Positions before them among this rank's tokens of the row, int64 [m]."""
    targets: torch.Tensor
    """The policy tokens, int64 [m]."""
    kept: KeptIds | None = None
    """Of truncated sampling."""
    index: torch.Tensor | None = None
    """Which of all ranks' n they are, int64 [m]; None: this rank computes all."""
    index_on_host: np.ndarray | None = None
    """`index`, which need not be asked of a device then."""
    num_all: int = 0
    """n."""


def gather_tokens(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Bring the tokens of all ranks together: [T / C, ...] to [T, ...], in the order of the row.

    order: where each token of the row is when the ranks' own ones lie end to end, int64 [T]. A
    token's gradient is the sum of those of all ranks. Collective."""
    return gather_end_to_end(tokens).index_select(0, order)


def gather_end_to_end(tokens: torch.Tensor) -> torch.Tensor:
    """Bring the tokens of all ranks together, rank after rank: [T / C, ...] to [T, ...].

    A token's gradient is the sum of those of all ranks. Collective."""
    group = parallel_state.get_context_parallel_group()
    gathered: torch.Tensor = mappings.gather_from_sequence_parallel_region(tokens, group=group)
    return gathered


def found_by_all(found: torch.Tensor, own: OwnTokens) -> torch.Tensor:
    """Bring what ranks found on their policy tokens together: fp32 [k, m] to [k, n], on each rank.

    A gradient goes back to the rank that found the value, once. Collective where ranks share
    rows."""
    if own.index is None:
        return found
    group = parallel_state.get_context_parallel_group()
    everything: torch.Tensor = _FoundByAll.apply(  # type: ignore[no-untyped-call]  # torch's
        found, own.index, own.num_all, group
    )
    return everything


class _FoundByAll(torch.autograd.Function):
    """See `found_by_all`: every value is one rank's, the others add 0 to it."""

    @staticmethod
    def forward(
        ctx: Any,
        found: torch.Tensor,
        index: torch.Tensor,
        num_all: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        everything = found.new_zeros(len(found), num_all)
        everything.index_copy_(1, index, found)
        dist.all_reduce(everything, group=group)
        return everything

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [index] = ctx.saved_tensors
        return grad.index_select(1, index), None, None, None
