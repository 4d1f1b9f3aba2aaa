"""Packed (thd) causal attention on torch SDPA: short sequences in padded batches, exactly.

One SDPA call per sequence is slow when a micro-batch holds hundreds of short ones. Sequences of
similar length share a call, padded at the end: causal attention never looks at later positions,
so the padding changes no real token, and its outputs are dropped."""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class Bucket:
    """`batch` sequences of at most `length` tokens."""

    rows: torch.Tensor | None  # int64 [batch * length], padding repeats row 0; None: see `start`
    start: int  # without rows: it is the tokens [start, start + batch * length), no copy needed
    batch: int
    length: int

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, d] -> [batch, heads, length, d]."""
        end = self.start + self.batch * self.length
        x = x[self.start : end] if self.rows is None else x.index_select(0, self.rows)
        return x.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2)


def plan_buckets(
    cu_seqlens: torch.Tensor, growth: float = 1.25
) -> tuple[list[Bucket], torch.Tensor | None]:
    """Group sequences whose lengths differ by at most the factor `growth`; cu_seqlens: cumulative
    lengths, [num_sequences + 1], starting at 0. Returns buckets, and where each token's output is
    in their concatenation, int64 [T]; None: where it is already."""
    bounds = cu_seqlens.tolist()
    device = cu_seqlens.device
    groups: list[list[tuple[int, int]]] = []  # (length, start)
    for span in sorted((b - a, a) for a, b in itertools.pairwise(bounds) if b > a):
        if groups and span[0] <= max(groups[-1][0][0] * growth, 4):
            groups[-1].append(span)
        else:
            groups.append([span])
    order = torch.empty(bounds[-1], dtype=torch.int64)
    buckets = []
    base = 0
    for group in groups:
        lengths, starts = (torch.tensor(x) for x in zip(*group, strict=True))
        length = group[-1][0]
        column = torch.arange(group[-1][0])
        rows = starts[:, None] + column
        real = column < lengths[:, None]
        order[rows[real]] = base + torch.arange(real.numel()).view_as(real)[real]
        rows = torch.where(real, rows, 0).flatten()
        first = int(starts[0])
        adjacent = torch.equal(rows, torch.arange(first, first + len(rows)))
        buckets.append(Bucket(None if adjacent else rows.to(device), first, len(group), length))
        base += real.numel()
    return buckets, None if torch.equal(order, torch.arange(base)) else order.to(device)


class PackedAttention(MegatronModule):
    """Drop-in core attention without Transformer Engine. Causal; GQA and MLA value sizes."""

    def __init__(self, config, *_, softmax_scale=None, k_channels=None, **__):
        super().__init__(config=config)
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError("sliding windows and learnable softmax need Transformer Engine")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(self, query, key, value, attention_mask, packed_seq_params, **_):
        """q, k, v [T, heads, d] packed -> [T, heads * d_v]."""
        plan = getattr(packed_seq_params, "bucket_plan", None)
        if plan is None:  # the same in every layer: kept on the parameters of the batch
            plan = packed_seq_params.bucket_plan = plan_buckets(packed_seq_params.cu_seqlens_q)
        (buckets, order), outputs = plan, []
        for bucket in buckets:
            q, k, v = (bucket.take(x) for x in (query, key, value))
            found = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(found.transpose(1, 2).flatten(0, 1))  # from [b, heads, s, d_v]
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return (output if order is None else output.index_select(0, order)).flatten(1)
