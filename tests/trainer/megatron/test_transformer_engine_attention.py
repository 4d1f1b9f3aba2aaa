"""What Transformer Engine's attention gets of a row with branches, and of one without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import split_row
from grpo_megatron.trainer.megatron import transformer_engine_attention
from grpo_megatron.trainer.megatron.packed_attention import (
    PackedAttention,
    RowPart,
    whole_row,
)
from grpo_megatron.trainer.megatron.row_context import RowContext
from grpo_megatron.trainer.megatron.transformer_engine_attention import with_gathered_keys


class Core:
    """Keeps what it was made of, and called with."""

    unfused_attention: Any

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any) -> None:
        self.config = config
        self.calls: list[dict[str, Any]] = []

    def forward(self, query, key, value, attention_mask, **settings):
        self.calls.append({"query": query, "key": key, "value": value, **settings})
        return query.flatten(1)


class CoreWithoutKernel(Core):
    """Has no kernel for what it is asked, and calls the attention for that with what it made."""

    def forward(self, query, key, value, attention_mask, **settings):
        return self.unfused_attention(None, query[:1], key[:1], value[:1], qkv_layout="bshd")


HEAD_SIZE = 8


def config_of(context_parallel_size: int = 1) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=2 * HEAD_SIZE,
        num_attention_heads=2,
        num_query_groups=1,
        attention_dropout=0.0,
        context_parallel_size=context_parallel_size,
    )


def attend(tree: RowTree) -> tuple[dict[str, Any], SimpleNamespace]:
    attention = with_gathered_keys(Core)(config_of())
    packed = SimpleNamespace(row_context=RowContext(whole_row(tree)))
    rows = torch.arange(tree.num_tokens)
    query, key, value = (rows[:, None, None] + 100 * part for part in range(3))
    output = attention.forward(
        query, key, value, None, attn_mask_type="causal", packed_seq_params=packed
    )
    assert output.shape == (tree.num_tokens, 1)
    [call] = attention.calls
    return call, packed


def test_branches_get_the_keys_of_their_paths():
    call, _ = attend(RowTree(np.array([3, 2, 1, 4]), np.array([-1, 0, 0, -1]), ()))
    assert call["query"].flatten().tolist() == list(range(10))
    paths = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    assert call["key"].flatten().tolist() == [100 + row for row in paths]
    assert call["value"].flatten().tolist() == [200 + row for row in paths]
    packed = call["packed_seq_params"]
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5, 6, 10]
    assert packed.cu_seqlens_kv.tolist() == [0, 3, 8, 12, 16]
    assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (4, 5)
    assert call["attn_mask_type"].name == "padding_causal_bottom_right"


def test_a_row_without_branches_is_left_alone():
    call, packed = attend(RowTree(np.array([3, 2]), np.array([-1, -1]), ()))
    assert call["packed_seq_params"] is packed
    assert call["attn_mask_type"] == "causal"
    assert call["key"].flatten().tolist() == [100, 101, 102, 103, 104]


TREES = {
    "samples of their own": RowTree(np.array([3, 8, 5]), np.array([-1, -1, -1]), ()),
    "branches": RowTree(np.array([3, 2, 1, 4]), np.array([-1, 0, 0, -1]), ()),
}


def numbers_of(tree: RowTree) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query = torch.randn(tree.num_tokens, 2, HEAD_SIZE)
    key, value = torch.randn(2, tree.num_tokens, 1, HEAD_SIZE)
    return tuple(tensor.requires_grad_() for tensor in (query, key, value))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_what_no_kernel_takes_is_computed_by_torch(tree, caplog):
    """Output and gradients are those of the attention that layers without Transformer Engine
    have."""
    transformer_engine_attention._say_no_kernel.cache_clear()
    found = []
    for module in (
        with_gathered_keys(CoreWithoutKernel)(config_of()),
        PackedAttention(config_of()),
    ):
        query, key, value = numbers_of(tree)
        packed = SimpleNamespace(row_context=RowContext(whole_row(tree)))
        output = module.forward(
            query, key, value, None, attn_mask_type="causal", packed_seq_params=packed
        )
        output.square().sum().backward()
        found.append((output, query.grad, key.grad, value.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
    [said] = caplog.messages
    assert said.startswith("attention: no kernel of Transformer Engine takes what is computed")


def test_what_no_kernel_takes_is_computed_by_torch_in_parts_too(monkeypatch):
    tree = RowTree(np.array([8, 4]), np.array([-1, -1]), ())
    query, key, value = numbers_of(tree)
    whole = PackedAttention(config_of()).forward(
        query, key, value, None, SimpleNamespace(row_context=RowContext(whole_row(tree)))
    )
    split = split_row(tree, 2, 1)
    own_tokens = [torch.from_numpy(split.own(rank)) for rank in range(2)]
    end_to_end = torch.cat(own_tokens)
    everything = {1: key[end_to_end], 2: value[end_to_end]}
    for rank, own in enumerate(own_tokens):
        # stand-ins for this rank's part, told apart by their shapes
        parts = {part: torch.zeros(part) for part in everything}
        monkeypatch.setattr(
            transformer_engine_attention,
            "gather_end_to_end",
            lambda tokens: everything[len(tokens)],
        )
        output = with_gathered_keys(CoreWithoutKernel)(config_of(2)).forward(
            query[own],
            parts[1],
            parts[2],
            None,
            attn_mask_type="causal",
            packed_seq_params=SimpleNamespace(row_context=RowContext(RowPart(split, rank))),
        )
        torch.testing.assert_close(output, whole[own])


def test_the_class_is_made_once():
    assert with_gathered_keys(Core) is with_gathered_keys(Core)


def test_parts_get_the_keys_of_all_ranks_and_no_other_context_parallelism(monkeypatch):
    """A row of 8 tokens and one of 4: rank 1 of 2 has the middle of both."""
    config = config_of(context_parallel_size=2)
    attention = with_gathered_keys(Core)(config)
    assert (attention.config.context_parallel_size, config.context_parallel_size) == (1, 2)
    split = split_row(RowTree(np.array([8, 4]), np.array([-1, -1]), ()), 2, 1)
    ends_to_ends = np.concatenate([split.own(rank) for rank in range(2)])

    def gathered(tokens: torch.Tensor) -> torch.Tensor:
        everything = torch.from_numpy(ends_to_ends) + 100 * (tokens[0, 0, 0] // 100)
        return everything[:, None, None]

    monkeypatch.setattr(transformer_engine_attention, "gather_end_to_end", gathered)
    rows = torch.from_numpy(split.own(1))[:, None, None]
    assert rows.flatten().tolist() == [2, 3, 4, 5, 9, 10]
    packed = SimpleNamespace(row_context=RowContext(RowPart(split, 1)))
    attention.forward(
        rows, rows + 100, rows + 200, None, attn_mask_type="causal", packed_seq_params=packed
    )
    [call] = attention.calls
    assert call["query"] is rows
    paths = [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert call["key"].flatten().tolist() == [100 + row for row in paths]
    assert call["value"].flatten().tolist() == [200 + row for row in paths]
    assert call["packed_seq_params"].cu_seqlens_q.tolist() == [0, 4, 6]
    assert call["packed_seq_params"].cu_seqlens_kv.tolist() == [0, 6, 9]
    assert call["attn_mask_type"].name == "padding_causal_bottom_right"
