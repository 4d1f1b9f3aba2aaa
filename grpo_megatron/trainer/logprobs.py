"""Token log-probs and entropies from hidden states, vocabulary split over tensor ranks.

Full-vocabulary logits exist for one chunk of tokens at a time, in the forward and in the
backward, which computes them again. Nothing of size [tokens, vocabulary] is kept.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor,
                   targets: torch.Tensor, *, vocab_size: int, temperature: float,
                   sequence_parallel: bool, chunk_tokens: int,
                   ) -> tuple[torch.Tensor, torch.Tensor]:
    """`log softmax(hidden @ weight.T / temperature)[targets]`, and the entropy.

    Args:
        hidden: last hidden states, [T (or T / TP with sequence parallelism), 1, H].
        weight: this rank's rows of the output layer, [V / TP, H].
        rows: int64 [n], positions whose next token is wanted.
        targets: int64 [n], that next token.
        vocab_size: real vocabulary; padded columns get probability 0.

    Returns:
        fp32 [n] log-probs and fp32 [n] entropies (nats), both with gradient, equal on all
        tensor-parallel ranks.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    selected = hidden.squeeze(1).index_select(0, rows)
    group = parallel_state.get_tensor_model_parallel_group()
    return _VocabParallelLogProbs.apply(selected, weight, targets, group, vocab_size,
                                        temperature, chunk_tokens)


class _Chunk:
    """Logits of some tokens on this rank's slice of the vocabulary."""

    def __init__(self, hidden, weight, targets, group, vocab_size, temperature):
        self.group = group if group.size() > 1 else None
        start = group.rank() * weight.size(0)
        logits = (hidden @ weight.t()).float()
        if temperature != 1.0:
            logits /= temperature
        if start + weight.size(0) > vocab_size:
            logits[:, max(vocab_size - start, 0):] = -torch.inf
        self.logits = logits
        local = targets - start
        self.owned = (local >= 0) & (local < weight.size(0))
        self.local = local.clamp(0, weight.size(0) - 1)

    def reduce(self, tensor, operation=dist.ReduceOp.SUM):
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def log_normaliser(self) -> torch.Tensor:
        maximum = self.reduce(self.logits.amax(-1), dist.ReduceOp.MAX)
        total = self.reduce((self.logits - maximum[:, None]).exp_().sum(-1))
        return maximum + total.log()

    def target_logits(self) -> torch.Tensor:
        own = self.logits.gather(-1, self.local[:, None])[:, 0]
        return self.reduce(torch.where(self.owned, own, 0.0))


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, group, vocab_size, temperature, chunk_tokens):
        ctx.settings = (group, vocab_size, temperature, chunk_tokens)
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            chunk = _Chunk(hidden[part], weight, targets[part], group, vocab_size, temperature)
            normaliser = chunk.log_normaliser()
            normalisers[part] = normaliser
            logprobs[part] = chunk.target_logits() - normaliser
            log_p = (chunk.logits - normaliser[:, None]).clamp_(min=-1e4)  # keeps 0 * inf out
            entropies[part] = chunk.reduce(-(log_p.exp() * log_p).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        group, vocab_size, temperature, chunk_tokens = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            chunk = _Chunk(hidden[part], weight, targets[part], group, vocab_size, temperature)
            log_p = (chunk.logits - normalisers[part, None]).clamp_(min=-1e4)
            p = log_p.exp()
            grad = -grad_logprobs[part, None] * p
            grad -= grad_entropies[part, None] * p * (log_p + entropies[part, None])
            own = torch.where(chunk.owned, grad_logprobs[part], 0.0)
            grad.scatter_add_(-1, chunk.local[:, None], own[:, None])
            grad = (grad / temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
