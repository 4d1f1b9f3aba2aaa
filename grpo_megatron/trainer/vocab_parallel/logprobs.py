"""Token log-probs and entropies from hidden states, vocabulary split over tensor ranks.

Full-vocabulary logits exist for one chunk of tokens at a time, in the forward and in the
backward, which computes them again: nothing of size [tokens, vocabulary] is kept. With
`keep_logits` they are kept instead, as the output layer gave them, which is the same to the bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

LOWEST_LOG_PROB = -1e4
"""Of padding, in place of minus infinity: keeps 0 * inf out of sums."""


@dataclass(frozen=True)
class KeptIds:
    """What truncated sampling could have chosen for each of n tokens, entry after entry."""

    token: torch.Tensor  # int64 [m], ascending
    ids: torch.Tensor  # int64 [m], vocabulary ids, no two the same of a token
    missing: torch.Tensor  # bool [n]: the token itself is not in its set, use the vocabulary
    token_on_host: np.ndarray | None = None  # `token`, which need not be asked of a device then


@dataclass(frozen=True)
class _Settings:
    group: dist.ProcessGroup  # of the tensor ranks that share the vocabulary
    vocab_size: int
    temperature: float
    chunk_tokens: int
    squared_probs: bool
    keep_logits: bool


def policy_states(
    hidden: torch.Tensor, rows: torch.Tensor, *, sequence_parallel: bool
) -> torch.Tensor:
    """Select `hidden` [T or T / TP, 1, H] at `rows` int64 [n], for a split output layer: [n, H]."""
    states: torch.Tensor
    if sequence_parallel:
        states = mappings.gather_from_sequence_parallel_region(hidden)
    else:
        states = mappings.copy_to_tensor_model_parallel_region(hidden)
    return states.squeeze(1).index_select(0, rows)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    kept: KeptIds | None = None,
    squared_probs: bool = False,
    keep_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Compute `log softmax(hidden @ weight.T / temperature)[targets]`, and the entropy.

    hidden: last hidden states of the wanted positions, [n, H]; weight: this rank's rows of the
    output layer, [V / TP, H]; targets: int64 [n], the tokens that follow; vocab_size: columns above
    it are padding, with probability 0; kept: truncated sampling, the softmax is over these only;
    keep_logits: [n, V / TP] in the dtype of `hidden` stay until the backward, which saves it the
    output layer's product.

    Returns fp32 [n] log-probs and entropies (nats), with gradient, equal on all tensor ranks; with
    `kept`, entropies and a third [n], log-probs, are those of the untruncated policy. With
    `squared_probs`, a last [n], without gradient, is the sum over the vocabulary of the untruncated
    policy's squared probabilities."""
    group = parallel_state.get_tensor_model_parallel_group()
    settings = _Settings(
        group,
        vocab_size,
        temperature,
        chunk_tokens,
        squared_probs,
        keep_logits and torch.is_grad_enabled(),
    )
    found: tuple[torch.Tensor, ...]
    found = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden, weight, targets, settings, kept
    )
    if kept is None:
        return found
    logprobs, entropies, truncated, *squares = found
    return torch.where(kept.missing, logprobs, truncated), entropies, logprobs, *squares


class Chunk:
    """Logits of some tokens on this rank's slice of the vocabulary, fp32 [tokens, V / TP].

    The slice begins with token id `start`; columns that are padding are minus infinity. product:
    `hidden @ weight.T`, where it is there already; it stays as it is."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        product: torch.Tensor | None = None,
    ):
        self.group: dist.ProcessGroup | None = None
        if group.size() > 1:
            self.group = group
        self.start = group.rank() * weight.size(0)
        if product is None:
            logits = (hidden @ weight.t()).float()
        else:
            logits = product.to(torch.float32, copy=True)  # it is changed below
        if temperature != 1.0:
            logits /= temperature
        if self.start + weight.size(0) > vocab_size:
            logits[:, max(vocab_size - self.start, 0) :] = -torch.inf
        self.logits = logits

    def reduce(
        self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce in place over the tensor ranks. Collective."""
        if self.group is not None:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def log_normaliser(self) -> torch.Tensor:
        """Compute the log of the softmax's denominator, fp32 [tokens]. Collective."""
        maximum = self.reduce(self.logits.amax(-1), dist.ReduceOp.MAX)
        return maximum + self.reduce((self.logits - maximum[:, None]).exp_().sum(-1)).log()


def add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add `grad.T @ hidden` to `total`, fp32 [V / TP, H].

    Takes no second matrix of that size where dtypes are the same."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


class _TargetChunk(Chunk):
    """A chunk, and where in this rank's slice the tokens are that were sampled."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        settings: _Settings,
        product: torch.Tensor | None = None,
    ):
        super().__init__(
            hidden, weight, settings.group, settings.vocab_size, settings.temperature, product
        )
        local = targets - self.start
        self.owned = (local >= 0) & (local < weight.size(0))
        self.local = local.clamp(0, weight.size(0) - 1)

    def target_logits(self) -> torch.Tensor:
        own = self.logits.gather(-1, self.local[:, None])[:, 0]
        return self.reduce(torch.where(self.owned, own, 0.0))


class _KeptChunk:
    """Logits of a chunk's kept ids, as far as they are in this rank's slice."""

    def __init__(self, chunk: Chunk, kept: KeptIds, bounds: list[int], number: int, first: int):
        entries = slice(bounds[number], bounds[number + 1])
        local = kept.ids[entries] - chunk.start
        size = chunk.logits.size(1)
        own = (local >= 0) & (local < size)
        self.chunk = chunk
        # other ranks' ids stay, with probability 0: to count them the host would wait
        self.local = local.clamp(0, size - 1)
        self.token = kept.token[entries] - first
        self.logits = torch.where(own, chunk.logits[self.token, self.local], -torch.inf)

    def log_normaliser(self) -> torch.Tensor:
        """Compute the log of the softmax's denominator; minus infinity for an empty set."""
        empty = self.logits.new_zeros(len(self.chunk.logits))
        maximum = self.chunk.reduce(
            (empty - torch.inf).scatter_reduce(0, self.token, self.logits, "amax"),
            dist.ReduceOp.MAX,
        )
        total = empty.index_add(0, self.token, (self.logits - maximum[self.token]).exp())
        return maximum + self.chunk.reduce(total).log()


def _entry_bounds(kept: KeptIds, num_tokens: int, chunk_tokens: int) -> list[int]:
    """Find the first entry of every chunk, and the end."""
    if kept.token_on_host is not None:
        starts = np.arange(0, num_tokens + chunk_tokens, chunk_tokens)
        return [int(bound) for bound in np.searchsorted(kept.token_on_host, starts)]
    firsts = torch.arange(0, num_tokens + chunk_tokens, chunk_tokens, device=kept.token.device)
    bounds: list[int] = torch.searchsorted(kept.token, firsts).tolist()
    return bounds


class _VocabParallelLogProbs(torch.autograd.Function):
    """See `token_logprobs`; without `torch.where`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        settings: _Settings,
        kept: KeptIds | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.settings = settings
        ctx.kept = kept
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        found = [logprobs, entropies]
        saved = [hidden, weight, targets, normalisers, entropies]
        if kept is not None:
            bounds = _entry_bounds(kept, len(targets), settings.chunk_tokens)
            truncated = torch.empty_like(logprobs)
            kept_normalisers = torch.empty_like(logprobs)
            found.append(truncated)
            saved.append(kept_normalisers)
        if settings.squared_probs:
            squares = torch.empty_like(logprobs)
            found.append(squares)
            ctx.mark_non_differentiable(squares)
        products: list[torch.Tensor] = []
        for number, start in enumerate(range(0, len(targets), settings.chunk_tokens)):
            part = slice(start, start + settings.chunk_tokens)
            product: torch.Tensor | None = None
            if settings.keep_logits:
                product = hidden[part] @ weight.t()
                products.append(product)
            chunk = _TargetChunk(hidden[part], weight, targets[part], settings, product)
            normaliser = chunk.log_normaliser()
            normalisers[part] = normaliser
            target = chunk.target_logits()
            logprobs[part] = target - normaliser
            if kept is not None:
                kept_normaliser = _KeptChunk(chunk, kept, bounds, number, start).log_normaliser()
                kept_normalisers[part] = kept_normaliser
                truncated[part] = target - kept_normaliser
            log_p = (chunk.logits - normaliser[:, None]).clamp_(min=LOWEST_LOG_PROB)
            entropies[part] = chunk.reduce(-(log_p.exp() * log_p).sum(-1))
            if settings.squared_probs:  # in place: `log_p` is not used again
                squares[part] = chunk.reduce(log_p.mul_(2).exp_().sum(-1))
        ctx.num_products = len(products)
        ctx.save_for_backward(*saved, *products)
        return tuple(found)

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: torch.Tensor,
        grad_entropies: torch.Tensor,
        *grads_of_others: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalisers, entropies, *rest = ctx.saved_tensors
        num_others = len(rest) - ctx.num_products
        products = rest[num_others:]
        rest = rest[:num_others]
        settings: _Settings = ctx.settings
        kept: KeptIds | None = ctx.kept
        grad_targets = grad_logprobs
        if kept is not None:
            [kept_normalisers] = rest
            bounds = _entry_bounds(kept, len(targets), settings.chunk_tokens)
            grad_truncated = grads_of_others[0]
            assert grad_truncated is not None  # `forward` had a third result
            grad_targets = grad_logprobs + grad_truncated
        grad_hidden = torch.empty_like(hidden)
        grad_weight: torch.Tensor | None = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for number, start in enumerate(range(0, len(targets), settings.chunk_tokens)):
            part = slice(start, start + settings.chunk_tokens)
            product: torch.Tensor | None = None
            if products:
                product = products[number]
            chunk = _TargetChunk(hidden[part], weight, targets[part], settings, product)
            log_p = (chunk.logits - normalisers[part, None]).clamp_(min=LOWEST_LOG_PROB)
            p = log_p.exp()
            grad = -grad_logprobs[part, None] * p
            grad -= grad_entropies[part, None] * p * (log_p + entropies[part, None])
            if kept is not None and grad_truncated is not None:
                some = _KeptChunk(chunk, kept, bounds, number, start)
                p_kept = (some.logits - kept_normalisers[part][some.token]).exp()
                grad.index_put_(
                    (some.token, some.local),
                    -grad_truncated[part][some.token] * p_kept,
                    accumulate=True,
                )
            own = torch.where(chunk.owned, grad_targets[part], 0.0)
            grad.scatter_add_(-1, chunk.local[:, None], own[:, None])
            grad = (grad / settings.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
