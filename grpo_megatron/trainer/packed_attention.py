"""Packed (thd) causal attention on torch SDPA: short sequences in padded batches, exactly.

One SDPA call per sequence is slow when a micro-batch holds hundreds of short ones. Sequences of
similar length share a call, padded at the end: causal attention never looks at later positions,
so the padding changes no real token, and its outputs are dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class Bucket:
    """`batch` sequences of at most `length` tokens: rows to gather, and which of them are real."""

    rows: torch.Tensor  # int64 [batch * length]; padding repeats row 0
    batch: int
    length: int


@dataclass(frozen=True)
class BucketPlan:
    """Buckets, and where each token's output is in their concatenation."""

    buckets: tuple[Bucket, ...]
    order: torch.Tensor  # int64 [T]


def plan_buckets(cu_seqlens: list[int], growth: float = 1.25) -> BucketPlan:
    """Group sequences whose lengths differ by at most `growth`.

    Args:
        cu_seqlens: cumulative lengths, [num_sequences + 1], starting at 0.
    """
    spans = [(b - a, a) for a, b in itertools.pairwise(cu_seqlens) if b > a]
    spans.sort()
    groups: list[list[tuple[int, int]]] = []
    for span in spans:
        if groups and span[0] <= max(groups[-1][0][0] * growth, 4):
            groups[-1].append(span)
        else:
            groups.append([span])
    order = torch.empty(cu_seqlens[-1], dtype=torch.int64)
    buckets, base = [], 0
    for group in groups:
        lengths, starts = (torch.tensor(x) for x in zip(*group, strict=True))
        length, column = group[-1][0], torch.arange(group[-1][0])
        rows = starts[:, None] + column
        real = column < lengths[:, None]
        order[rows[real]] = base + torch.arange(real.numel()).view_as(real)[real]
        buckets.append(Bucket(torch.where(real, rows, 0).flatten(), len(group), length))
        base += real.numel()
    return BucketPlan(tuple(buckets), order)


class PackedAttention(MegatronModule):
    """Drop-in core attention without Transformer Engine. Causal; GQA and MLA value sizes."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type,
                 attention_dropout=None, softmax_scale=None, cp_comm_type=None,
                 pg_collection=None, k_channels=None, v_channels=None):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError("sliding windows and learnable softmax need Transformer Engine")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError("RL trains without attention dropout")

    def forward(self, query, key, value, attention_mask, attn_mask_type=None,
                attention_bias=None, packed_seq_params=None):
        """q, k, v [T, heads, d] packed -> [T, heads * d_v]; or [s, b, heads, d] -> [s, b, ...]."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2).contiguous()
        plan = _plan_of(packed_seq_params)
        outputs = []
        for bucket in plan.buckets:
            q, k, v = (x.index_select(0, bucket.rows)
                       .view(bucket.batch, bucket.length, *x.shape[1:]).transpose(1, 2)
                       for x in (query, key, value))
            outputs.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.order).flatten(1)

    def _attend(self, q, k, v):
        """[b, heads, s, d] -> [b, heads, s, d_v], causal."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale,
                                              enable_gqa=q.size(1) != k.size(1))


def _plan_of(packed_seq_params) -> BucketPlan:
    """The plan is the same in every layer: made once, kept on the parameters of the batch."""
    plan = getattr(packed_seq_params, "bucket_plan", None)
    if plan is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q
        plan = plan_buckets(cu_seqlens.tolist())
        device = cu_seqlens.device
        plan = BucketPlan(tuple(Bucket(b.rows.to(device), b.batch, b.length)
                                for b in plan.buckets), plan.order.to(device))
        packed_seq_params.bucket_plan = plan
    return plan
