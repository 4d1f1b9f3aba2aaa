"""What our parts of Megatron's layers know of the packed row beside Megatron's own arguments.

Megatron hands attention and layers a `PackedSeqParams`, and the rotation of queries and keys only
its `cu_seqlens_q`. So the `RowContext` of a row is an attribute of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from grpo_megatron.trainer.megatron.deep_features import DeepFeatures
    from grpo_megatron.trainer.megatron.packed_attention import BucketPlan, RowPart
    from grpo_megatron.trainer.megatron.rope import Angles
    from grpo_megatron.trainer.megatron.transformer_engine_attention import GatheredKeys


@dataclass
class RowContext:
    """One row of a micro-batch; by default sequences of which nothing else is known.

    What is found once and is the same in every layer is kept here, too."""

    part: RowPart | None = None
    """The tree of the row, and what this rank computes of it; None: every sequence is a segment."""
    positions: torch.Tensor | None = None
    """Where this rank's tokens are in their samples, int64 [T / C], or in time, height and width,
    [3, T / C]; None: every sequence begins at 0."""
    axes: Sequence[slice] | None = None
    """Which angles of a head go by positions in height, and in width (`rope.axes_of`)."""
    deep: DeepFeatures | None = None
    """Features of images that are added after the first layers."""

    angles: Angles | None = None
    bucket_plan: BucketPlan | None = None
    gathered_keys: GatheredKeys | None = None


def attach(packed: PackedSeqParams, row: RowContext) -> None:
    """Let `row_of` find the context by `packed`, and by its `cu_seqlens_q`."""
    carriers: tuple[Any, ...] = (packed, packed.cu_seqlens_q)
    for carrier in carriers:
        carrier.row_context = row


def row_of(carrier: Any) -> RowContext:
    """Return the context of a `PackedSeqParams`, or of its `cu_seqlens_q`; one without any gets an
    empty one."""
    found: RowContext | None = getattr(carrier, "row_context", None)
    if found is None:
        found = RowContext()
        carrier.row_context = found
    return found
