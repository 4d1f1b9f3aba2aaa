"""Token log-probs and entropies from hidden states, vocabulary split over tensor ranks.

Full-vocabulary logits exist for one chunk of tokens at a time, in the forward and in the
backward, which computes them again. Nothing of size [tokens, vocabulary] is kept."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings


@dataclass(frozen=True)
class Kept:
    """What truncated sampling could have chosen for each of n tokens, entry after entry."""

    token: torch.Tensor  # int64 [m], ascending
    ids: torch.Tensor  # int64 [m], vocabulary ids, no two the same of a token
    missing: torch.Tensor  # bool [n]: the token itself is not in its set, use the vocabulary


def policy_states(
    hidden: torch.Tensor, rows: torch.Tensor, *, sequence_parallel: bool
) -> torch.Tensor:
    """`hidden` [T or T / TP, 1, H] at `rows` int64 [n], for a split output layer: [n, H]."""
    gather = (
        mappings.gather_from_sequence_parallel_region
        if sequence_parallel
        else mappings.copy_to_tensor_model_parallel_region
    )
    return gather(hidden).squeeze(1).index_select(0, rows)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    kept: Kept | None = None,
) -> tuple[torch.Tensor, ...]:
    """`log softmax(hidden @ weight.T / temperature)[targets]`, and the entropy.

    hidden: last hidden states of the wanted positions, [n, H]; weight: this rank's rows of the
    output layer, [V / TP, H]; targets: int64 [n], the tokens that follow; vocab_size: columns above
    it are padding, with probability 0; kept: truncated sampling, the softmax is over these only.

    Returns fp32 [n] log-probs and entropies (nats), with gradient, equal on all tensor ranks; with
    `kept`, entropies and a third [n], log-probs, are those of the untruncated policy."""
    group = parallel_state.get_tensor_model_parallel_group()
    found = _VocabParallelLogProbs.apply(
        hidden, weight, targets, group, vocab_size, temperature, chunk_tokens, kept
    )
    if kept is None:
        return found
    logprobs, entropies, truncated = found
    return torch.where(kept.missing, logprobs, truncated), entropies, logprobs


class Chunk:
    """Logits of some tokens on this rank's slice of the vocabulary."""

    def __init__(self, hidden, weight, group, vocab_size, temperature):
        self.group = group if group.size() > 1 else None
        self.start = start = group.rank() * weight.size(0)
        logits = (hidden @ weight.t()).float()
        if temperature != 1.0:
            logits /= temperature
        if start + weight.size(0) > vocab_size:
            logits[:, max(vocab_size - start, 0) :] = -torch.inf
        self.logits = logits

    def reduce(self, tensor, operation=dist.ReduceOp.SUM):
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def log_normaliser(self) -> torch.Tensor:
        maximum = self.reduce(self.logits.amax(-1), dist.ReduceOp.MAX)
        return maximum + self.reduce((self.logits - maximum[:, None]).exp_().sum(-1)).log()


def add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """`total += grad.T @ hidden`, fp32 [V / TP, H], where dtypes allow without a second one."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


class _TargetChunk(Chunk):
    def __init__(self, hidden, weight, targets, *settings):
        super().__init__(hidden, weight, *settings)
        local = targets - self.start
        self.owned = (local >= 0) & (local < weight.size(0))
        self.local = local.clamp(0, weight.size(0) - 1)

    def target_logits(self) -> torch.Tensor:
        own = self.logits.gather(-1, self.local[:, None])[:, 0]
        return self.reduce(torch.where(self.owned, own, 0.0))


class _KeptChunk:
    """Logits of a chunk's kept ids, as far as they are in this rank's slice."""

    def __init__(self, chunk: Chunk, kept: Kept, bounds: list[int], number: int, first: int):
        entries = slice(bounds[number], bounds[number + 1])
        local = kept.ids[entries] - chunk.start
        own = (local >= 0) & (local < chunk.logits.size(1))
        self.chunk = chunk
        self.local = local[own]
        self.token = kept.token[entries][own] - first
        self.logits = chunk.logits[self.token, self.local]

    def log_normaliser(self) -> torch.Tensor:
        """Minus infinity for an empty set."""
        empty = self.logits.new_zeros(len(self.chunk.logits))
        maximum = self.chunk.reduce(
            (empty - torch.inf).scatter_reduce(0, self.token, self.logits, "amax"),
            dist.ReduceOp.MAX,
        )
        total = empty.index_add(0, self.token, (self.logits - maximum[self.token]).exp())
        return maximum + self.chunk.reduce(total).log()


def _entry_bounds(kept: Kept, num_tokens: int, chunk_tokens: int) -> list[int]:
    """First entry of every chunk, and the end."""
    firsts = torch.arange(0, num_tokens + chunk_tokens, chunk_tokens, device=kept.token.device)
    return torch.searchsorted(kept.token, firsts).tolist()


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, group, vocab_size, temperature, chunk_tokens, kept):
        ctx.settings = chunk_tokens, kept, *(layout := (group, vocab_size, temperature))
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        if kept is not None:
            bounds = _entry_bounds(kept, len(targets), chunk_tokens)
            truncated, kept_normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for number, start in enumerate(range(0, len(targets), chunk_tokens)):
            part = slice(start, start + chunk_tokens)
            chunk = _TargetChunk(hidden[part], weight, targets[part], *layout)
            normalisers[part] = normaliser = chunk.log_normaliser()
            target = chunk.target_logits()
            logprobs[part] = target - normaliser
            if kept is not None:
                among = _KeptChunk(chunk, kept, bounds, number, start).log_normaliser()
                kept_normalisers[part], truncated[part] = among, target - among
            log_p = (chunk.logits - normaliser[:, None]).clamp_(min=-1e4)  # keeps 0 * inf out
            entropies[part] = chunk.reduce(-(log_p.exp() * log_p).sum(-1))
        more = () if kept is None else (kept_normalisers,)
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies, *more)
        return (logprobs, entropies) if kept is None else (logprobs, entropies, truncated)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies, grad_truncated=None):
        hidden, weight, targets, normalisers, entropies, *kept_normalisers = ctx.saved_tensors
        chunk_tokens, kept, *layout = ctx.settings
        grad_targets = grad_logprobs
        if kept is not None:
            bounds = _entry_bounds(kept, len(targets), chunk_tokens)
            grad_targets = grad_logprobs + grad_truncated
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for number, start in enumerate(range(0, len(targets), chunk_tokens)):
            part = slice(start, start + chunk_tokens)
            chunk = _TargetChunk(hidden[part], weight, targets[part], *layout)
            log_p = (chunk.logits - normalisers[part, None]).clamp_(min=-1e4)
            p = log_p.exp()
            grad = -grad_logprobs[part, None] * p
            grad -= grad_entropies[part, None] * p * (log_p + entropies[part, None])
            if kept is not None:
                some = _KeptChunk(chunk, kept, bounds, number, start)
                p_kept = (some.logits - kept_normalisers[0][part][some.token]).exp()
                grad.index_put_(
                    (some.token, some.local),
                    -grad_truncated[part][some.token] * p_kept,
                    accumulate=True,
                )
            own = torch.where(chunk.owned, grad_targets[part], 0.0)
            grad.scatter_add_(-1, chunk.local[:, None], own[:, None])
            grad = (grad / layout[-1]).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            add_product(grad_weight, grad, hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), *(None,) * 6
