"""KL divergence between student and teacher over the vocabulary, split over tensor ranks.

With `r_v = log p_v - log q_v` of student p and teacher q, reverse KL is `sum_v p_v r_v` with the
gradient `p_v (r_v - KL)` on the student's logits, forward KL `-sum_v q_v r_v` with `p_v - q_v`.
`topk_tail` joins all tokens but the teacher's k likeliest into one: their ratio is that of the
tails, and both formulas stay (without the tail, reverse KL is biased and may be negative).

Logits exist for one chunk of tokens at a time: a teacher is hidden states and an output layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from grpo_megatron.trainer.vocab_parallel.logprobs import LOWEST_LOG_PROB, Chunk, add_product


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher thinks of some policy tokens of a micro-batch, in one of two forms."""

    rows: torch.Tensor  # int64 [m]: which of the n policy tokens; of a distribution, this rank's
    weight: float  # factor of their divergences in the loss
    settings: "DivergenceSettings"
    hidden: torch.Tensor | None = None  # [m, H], with `head`: the whole vocabulary
    head: torch.Tensor | None = None  # [V / TP, H]: this rank's rows of its output layer
    ids: torch.Tensor | None = None  # int64 [m, k], with `logprobs`: its likeliest tokens
    logprobs: torch.Tensor | None = None  # fp32 [m, k]
    tail: torch.Tensor | None = None  # fp32 [m]: log-prob of all others together

    @property
    def is_whole(self) -> bool:
        """Whether there is a distribution, not only log-probs [m] of the sampled tokens."""
        return self.head is not None or self.ids is not None


@dataclass(frozen=True)
class DivergenceSettings:
    """How logits of student and teacher are computed, and which divergence is taken."""

    vocab_size: int  # columns above it are padding
    temperature: float  # divides the logits of both
    chunk_tokens: int  # tokens whose logits exist at a time
    forward_weight: float  # 0: reverse KL, 1: forward KL, between: their mixture


def divergence(
    hidden: torch.Tensor, weight: torch.Tensor, teacher: TeacherTokens, group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute the KL at `teacher.rows`, fp32 [m] (nats), with gradient; equal on all tensor ranks.

    `hidden` are the student's states of n policy tokens, [n, H], `weight` is its output layer,
    [V / TP, H], `group` the tensor ranks."""
    found: torch.Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden.index_select(0, teacher.rows), weight, teacher, group
    )
    return found


def likeliest(
    hidden: torch.Tensor,
    head: torch.Tensor,
    k: int,
    group: dist.ProcessGroup,
    settings: DivergenceSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a teacher's `ids`, `logprobs` and `tail` (see `TeacherTokens`).

    `hidden` are its states of m tokens, [m, H], `head` is its output layer, [V / TP, H]."""
    all_ids = []
    all_logprobs = []
    all_tails = []
    for states in hidden.split(settings.chunk_tokens):
        chunk = _chunk(states, head, group, settings)
        log_q = _normalised(chunk)
        values, local = log_q.topk(min(k, log_q.size(1)))
        ids = local + chunk.start
        if chunk.group is not None:
            values = gather_from_tensor_model_parallel_region(values, group)
            ids = gather_from_tensor_model_parallel_region(ids, group)
        best, order = values.topk(min(k, values.size(1)))
        ids = ids.gather(1, order)
        token, place = _owned(chunk, ids)
        all_ids.append(ids)
        all_logprobs.append(best)
        all_tails.append(_log_tail(chunk, log_q, ids, token, place))
    return torch.cat(all_ids), torch.cat(all_logprobs), torch.cat(all_tails)


def _owned(chunk: Chunk, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find (token, place) of the ids [tokens, k] that lie in this rank's slice."""
    local = ids - chunk.start
    is_owned = (local >= 0) & (local < chunk.logits.size(1))
    token, place = is_owned.nonzero(as_tuple=True)
    return token, place


def _log_tail(
    chunk: Chunk, log_p: torch.Tensor, ids: torch.Tensor, token: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Compute the log-probability of everything but `ids`; summed, since 1 - sum would cancel."""
    tail = log_p.exp()
    tail[token, ids[token, place] - chunk.start] = 0.0
    return chunk.reduce(tail.sum(-1)).clamp_(min=torch.finfo(torch.float32).tiny).log()


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    settings: DivergenceSettings,
) -> Chunk:
    return Chunk(hidden, weight, group, settings.vocab_size, settings.temperature)


class _Divergence(torch.autograd.Function):
    """See `divergence`; hidden: the student's states of the m tokens, [m, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: TeacherTokens,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.teacher = teacher
        ctx.group = group
        settings = teacher.settings
        values = hidden.new_empty(len(hidden), dtype=torch.float32)
        reverse = torch.empty_like(values)
        for part in _parts(len(hidden), settings):
            chunk = _chunk(hidden[part], weight, group, settings)
            log_p, ratio = _log_ratio(chunk, teacher, part, group)
            forward: torch.Tensor | None = None
            if settings.forward_weight:
                forward = -chunk.reduce((log_p - ratio).exp_().mul_(ratio).sum(-1))
            reverse[part] = chunk.reduce(log_p.exp_().mul_(ratio).sum(-1))
            values[part] = reverse[part]
            if forward is not None:
                values[part] = reverse[part].lerp(forward, settings.forward_weight)
        ctx.save_for_backward(hidden, weight, reverse)
        return values

    @staticmethod
    def backward(
        ctx: Any, grad_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, reverse = ctx.saved_tensors
        teacher: TeacherTokens = ctx.teacher
        group: dist.ProcessGroup = ctx.group
        settings = teacher.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(len(hidden), settings):
            chunk = _chunk(hidden[part], weight, group, settings)
            log_p, ratio = _log_ratio(chunk, teacher, part, group)
            q: torch.Tensor | None = None
            if settings.forward_weight:
                q = (log_p - ratio).exp_()
            p = log_p.exp_()
            grad = ratio.sub_(reverse[part, None]).mul_(p)
            if q is not None:
                grad.lerp_(torch.sub(p, q, out=q), settings.forward_weight)
            grad = grad.mul_(grad_values[part, None] / settings.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            add_product(grad_weight, grad, hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _parts(count: int, settings: DivergenceSettings) -> list[slice]:
    step = settings.chunk_tokens
    return [slice(start, start + step) for start in range(0, count, step)]


def _normalised(chunk: Chunk) -> torch.Tensor:
    """Turn the logits of a chunk into log-probs, in place. Collective."""
    return chunk.logits.sub_(chunk.log_normaliser()[:, None]).clamp_(min=LOWEST_LOG_PROB)


def _log_ratio(
    chunk: Chunk, teacher: TeacherTokens, part: slice, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `log p` and `log p - log q` on this rank's slice of the vocabulary.

    Both are fp32 [tokens, V / TP], the ratio is 0 where p is padding. Collective."""
    log_p = _normalised(chunk)
    if teacher.ids is None:
        assert teacher.hidden is not None and teacher.head is not None  # the other form
        theirs = _chunk(teacher.hidden[part], teacher.head, group, teacher.settings)
        log_q = _normalised(theirs)
        return log_p, torch.sub(log_p, log_q, out=log_q)
    assert teacher.logprobs is not None and teacher.tail is not None  # come with `ids`
    ids = teacher.ids[part]
    token, place = _owned(chunk, ids)
    local = ids[token, place] - chunk.start
    tail = _log_tail(chunk, log_p, ids, token, place) - teacher.tail[part]
    ratio = tail[:, None].expand_as(log_p).contiguous()
    ratio[token, local] = log_p[token, local] - teacher.logprobs[part][token, place]
    return log_p, ratio
