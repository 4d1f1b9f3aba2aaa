"""Cases for worker groups that look at one part of the trainer, without a whole model."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import RowSplit, split_row
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.trainer.megatron import packed_attention
from grpo_megatron.trainer.megatron.packed_attention import PackedAttention, RowPart
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.megatron.row_context import RowContext
from grpo_megatron.trainer.megatron.transformer_engine_attention import gather_keys
from grpo_megatron.trainer.vocab_parallel.divergence import (
    DivergenceSettings,
    TeacherTokens,
    divergence,
    likeliest,
)
from grpo_megatron.trainer.vocab_parallel.logprobs import KeptIds, policy_states, token_logprobs
from tests.trainer.head_inputs import head_inputs
from tests.trainer.worker_group import fresh_store


def _initialize(layout: dict[str, Any]) -> None:
    info = RankInfo.from_environment()
    initialize(
        TrainerConfig(num_ranks=info.world_size, num_threads=1, **layout), info, fresh_store()
    )


def random_numbers(layout: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Per rank: numbers after seeding, inside and outside parallel regions."""
    _initialize(layout)
    seed_everything(seed)
    mine: dict[str, Any] = {
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "default": tuple(torch.rand(3).tolist()),
    }
    for name, arguments in (
        ("region", ()),
        ("expert_region", (get_expert_parallel_rng_tracker_name(),)),
    ):
        with get_cuda_rng_tracker().fork(*arguments):
            mine[name] = tuple(torch.rand(3).tolist())
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, mine)
    return world


def kinds_of_device() -> tuple[list[str], str]:
    """Of tensors that are made where `meta` is the default, and where "cuda" is named."""
    with torch.device("meta"):
        made = (torch.empty(2), torch.zeros(2), torch.ones(2), torch.tensor([2.0]))
    return [tensor.device.type for tensor in made], torch.zeros(2, device="cuda").device.type


def kl(
    layout: dict[str, Any],
    seed: int,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    forward_weight: float,
    top_k: int | None,
) -> dict[str, np.ndarray]:
    """KL to a random teacher at some of 13 tokens, and its gradients; whole tensors on rank 0."""
    _initialize(layout)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    student, teacher = (head_inputs(seed + i, vocab_size) for i in range(2))
    padding = -vocab_size % size

    def part(weight: torch.Tensor) -> torch.Tensor:
        return F.pad(weight, (0, 0, 0, padding), value=3.0).float().chunk(size)[rank].clone()

    weight, head = part(student["weight"]).requires_grad_(), part(teacher["weight"])
    hidden = student["hidden"][:13, 0].float().requires_grad_()
    rows, settings = (
        torch.arange(1, 13, 2),
        DivergenceSettings(vocab_size, temperature, chunk_tokens, forward_weight),
    )
    taught = teacher["hidden"][rows, 0].float()
    columns = (
        {"hidden": taught, "head": head}
        if top_k is None
        else dict(
            zip(
                ("ids", "logprobs", "tail"),
                likeliest(taught, head, top_k, group, settings),
                strict=True,
            )
        )
    )
    found = divergence(hidden, weight, TeacherTokens(rows, 1.0, settings, **columns), group)
    (found @ student["a"][rows].float()).backward()
    dist.all_reduce(hidden.grad, group=group)  # what the region around an output layer does
    parts = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(parts, weight.grad, group=group)
    return {
        "kl": found.detach().numpy(),
        "hidden": hidden.grad.numpy(),
        "weight": torch.cat(parts)[:vocab_size].numpy(),
    }


def head(
    layout: dict[str, Any],
    seed: int,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    sequence_parallel: bool,
    truncated: bool,
    keep_logits: bool = False,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Log-probs, entropies, squared probabilities and gradients of a random head; whole tensors on
    rank 0. `saved`: bytes that wait for the backward."""
    _initialize(layout)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    inputs = head_inputs(seed, vocab_size)
    padding = -vocab_size % size
    full = F.pad(inputs["weight"], (0, 0, 0, padding), value=3.0).to(getattr(torch, dtype))
    weight = full.chunk(size)[rank].clone().requires_grad_()
    hidden = inputs["hidden"].to(getattr(torch, dtype))
    local = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    kept = None
    if truncated:
        missing = torch.zeros(13, dtype=torch.bool)
        missing[[3, 8]] = True
        kept = KeptIds(*inputs["sets"].nonzero(as_tuple=True), missing)
    states = policy_states(local, inputs["rows"], sequence_parallel=sequence_parallel)
    *found, squares = token_logprobs(
        states,
        weight,
        inputs["targets"],
        vocab_size=vocab_size,
        kept=kept,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        squared_probs=True,
        keep_logits=keep_logits,
    )
    saved = found[1].grad_fn.saved_tensors
    sum(part @ inputs[name].float() for part, name in zip(found, "abc", strict=False)).backward()

    def gather(tensor: torch.Tensor) -> np.ndarray:
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts).float().numpy()

    weight_gradient = gather(weight.grad)
    names = ("logprobs", "entropies", "untruncated")
    return {
        "saved": sum(tensor.nbytes for tensor in saved),
        **{n: part.detach().numpy() for n, part in zip(names, found, strict=False)},
        "squares": squares.numpy(),
        "hidden": gather(local.grad) if sequence_parallel else local.grad.float().numpy(),
        "weight": weight_gradient[:vocab_size],
        "padding": weight_gradient[vocab_size:],
    }


def attention(
    lengths: list[int],
    num_heads: int,
    num_groups: int,
    value_size: int,
) -> dict[str, float]:
    """Largest errors of packed attention and its gradients against one call a sequence."""
    module = _attention_module(num_heads, num_groups)
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = {
        "query": (total, num_heads, 8),
        "key": (total, num_groups, 8),
        "value": (total, num_groups, value_size),
    }
    found = {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}
    plain = {n: t.detach().double().requires_grad_() for n, t in found.items()}
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    output = module(**found, attention_mask=None, packed_seq_params=packed)
    expected = torch.cat(
        [_one_sequence(*(t[a:b] for t in plain.values())) for a, b in itertools.pairwise(ends)]
    )
    weights = torch.randn(output.shape, generator=generator)
    (output * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    pairs = SimpleNamespace(
        output=(output, expected), **{n: (t.grad, plain[n].grad) for n, t in found.items()}
    )
    return {n: float((a.double() - b).detach().abs().max()) for n, (a, b) in vars(pairs).items()}


def tree_attention(
    lengths: list[int],
    parents: list[int],
    num_heads: int,
    num_groups: int,
    value_size: int,
    num_context_ranks: int = 1,
) -> dict[str, float]:
    """Largest errors of attention in a row with branches against a dense mask, in float64.

    With several context-parallel ranks this process is one after the other. `gathered`: of the
    layout that Transformer Engine takes, computed as it says, sequence by sequence, causal from the
    bottom right."""
    split = split_row(RowTree(np.array(lengths), np.array(parents), ()), num_context_ranks, 1)
    tree = split.tree
    module = _attention_module(num_heads, num_groups)
    generator = torch.Generator().manual_seed(sum(lengths))
    total = tree.num_tokens
    shapes = {
        "query": (total, num_heads, 8),
        "key": (total, num_groups, 8),
        "value": (total, num_groups, value_size),
    }
    found = {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}
    plain = {n: t.detach().double().requires_grad_() for n, t in found.items()}
    output = _in_parts(module, split, **found)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for segment in range(len(tree.lengths)):
        first, end = tree.bounds[segment : segment + 2]
        mask[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
        mask[first:end, torch.from_numpy(tree.prefix(segment))] = True
    expected = _masked(*plain.values(), mask)
    weights = torch.randn(output.shape, generator=generator)
    (output * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    pairs = {"output": (output, expected)}
    for name, tensor in found.items():
        pairs[name] = (tensor.grad, plain[name].grad)
    pairs["gathered"] = (_by_gathered_keys(split, *plain.values()), expected)
    return {n: float((a.double() - b).detach().abs().max()) for n, (a, b) in pairs.items()}


def _in_parts(module: PackedAttention, split: RowSplit, query, key, value) -> torch.Tensor:
    """Attention of one rank's queries after the other's; what they gather is there already."""
    outputs = []
    with mock.patch.object(packed_attention, "gather_tokens", lambda tokens, order: tokens):
        for rank in range(split.num_ranks):
            own = query[torch.from_numpy(split.own(rank))]
            packed = SimpleNamespace(row_context=RowContext(RowPart(split, rank)))
            outputs.append(module(own, key, value, None, packed))
    return torch.cat(outputs)[torch.from_numpy(split.gathered_places)]


def _by_gathered_keys(split: RowSplit, query, key, value) -> torch.Tensor:
    """Attention with what `gather_keys` says."""
    own_tokens = [torch.from_numpy(split.own(rank)) for rank in range(split.num_ranks)]
    end_to_end = torch.cat(own_tokens)  # what a group gathers
    outputs = []
    for rank, own in enumerate(own_tokens):
        gathered = gather_keys(RowPart(split, rank), query.device)
        paths = end_to_end[gathered.rows]
        own_query, keys, values = query[own], key[paths], value[paths]
        bounds = zip(
            itertools.pairwise(gathered.packed.cu_seqlens_q.tolist()),
            itertools.pairwise(gathered.packed.cu_seqlens_kv.tolist()),
            strict=True,
        )
        for (first, end), (first_key, end_key) in bounds:
            num_queries, num_keys = end - first, end_key - first_key
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
            seen = slice(first_key, end_key)
            outputs.append(_masked(own_query[first:end], keys[seen], values[seen], mask))
    return torch.cat(outputs)[torch.from_numpy(split.gathered_places)]


def _attention_module(num_heads: int, num_groups: int) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8 * num_heads,
        attention_dropout=0.0,
        num_attention_heads=num_heads,
        num_query_groups=num_groups,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self")


def _one_sequence(query, key, value) -> torch.Tensor:
    """Causal softmax attention, written out."""
    causal = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    return _masked(query, key, value, causal)


def _masked(query, key, value, sees: torch.Tensor) -> torch.Tensor:
    """Softmax attention, written out. sees: bool [queries, keys]."""
    repeat = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(-1) ** 0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
