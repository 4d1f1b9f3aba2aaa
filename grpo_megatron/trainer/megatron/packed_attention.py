"""Packed (thd) causal attention on torch SDPA: short sequences in padded batches, exactly.

One SDPA call per sequence is slow when a micro-batch holds hundreds of short ones. Segments of
similar length share a call, padded at the end: causal attention never looks at later positions,
so the padding changes no real token, and its outputs are dropped.

A row is a tree of segments (`batching.prefix_rows`). A branch takes the keys and values of the
segments above it into its call: its queries see these, and their own causally. Where a branch is
much longer than what is above, the queries of that are computed again with it, which is less work
than a mask, and dropped.

With context parallelism a rank has the queries of its part of the row (`batching.row_split`), and
gathers the keys and values of all parts: each of its spans is a branch of all tokens before it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import RowSplit, split_row
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.megatron.context_parallel import gather_tokens
from grpo_megatron.trainer.megatron.row_context import row_of

_BLOCK_KEYS = 512
"""Of torch's flash attention on a CPU."""
_BLOCK_QUERIES = 512
"""Of a piece that takes a mask: what is behind the last of them is not even read."""
_MUCH_LONGER = 4
"""How many times longer than what is above it a branch is taken causally; measured."""


@dataclass(frozen=True)
class RowPart:
    """What this rank computes of a row."""

    split: RowSplit
    rank: int = 0
    """Of the ranks that share the row."""

    def order_of_keys(self, device: torch.device) -> torch.Tensor:
        """Return where each token of the row is in what the ranks gather, int64 [T]."""
        return to_device(torch.from_numpy(self.split.gathered_places), device)

    @property
    def needs_gathered_keys(self) -> bool:
        """Whether queries see other keys than those of the same adjacent tokens."""
        return self.split.tree.has_branches or not self.split.is_whole

    def segments(self) -> Iterator["_Segment"]:
        """Yield what is computed here, in the order of the row."""
        for span in self.split.spans(self.rank):
            yield _Segment(span.above, span.own)


@dataclass(frozen=True)
class _Rows:
    """Tokens of a row: `batch` sequences of `length`, padded."""

    index: torch.Tensor | None  # int64 [batch * length]; None: see `start`
    start: int  # without index: the tokens [start, start + batch * length), no copy needed
    batch: int
    length: int

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Take the tokens: [T, heads, d] to [batch, heads, length, d]."""
        if self.index is None:
            end = self.start + self.batch * self.length
            x = x[self.start : end]
        else:
            x = x.index_select(0, self.index)
        return x.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class Bucket:
    """Segments of one call."""

    queries: _Rows
    keys: _Rows
    mask: torch.Tensor | None
    """Added to scores, [batch or 1, 1, queries, keys]; None: causal, queries are keys."""


@dataclass(frozen=True)
class BucketPlan:
    """All calls of a row."""

    buckets: list[Bucket]
    order: torch.Tensor | None
    """Where the output of each of this rank's tokens is in those of the buckets, int64 [T / C];
    None: where it is."""
    order_of_keys: torch.Tensor | None
    """Where each token of the row is in what the ranks gather, int64 [T]; None: one has all."""


def plan_buckets(part: RowPart, device: torch.device, dtype: torch.dtype) -> BucketPlan:
    """Plan the calls for a part of a row; tensors are on `device`, masks have `dtype`."""
    causal: list[_Segment] = []
    masked: list[_Segment] = []
    for segment in part.segments():
        if not len(segment.prefix):
            causal.append(segment)
        elif not part.split.is_whole:  # queries of what is above are on other ranks
            masked += segment.blocks()
        elif segment.is_cheaper_causal:
            causal.append(segment)
        else:
            masked.append(segment)
    planner = _Planner(part, device, dtype)
    for group in _similar(causal, _whole_length, _up_to_a_quarter_more):
        planner.add_causal(group)
    longest_first = reversed(_similar(masked, _prefix_length, _few_tokens_more))  # and its mask
    for with_similar_prefix in longest_first:
        for group in _similar(with_similar_prefix, _own_length, _up_to_a_quarter_more):
            planner.add_masked(group)
    return planner.plan()


@dataclass(frozen=True)
class _Segment:
    """Where tokens of a segment, and those above it, are in the row: int64."""

    prefix: np.ndarray
    own: np.ndarray

    @property
    def is_cheaper_causal(self) -> bool:
        """Whether a causal call over all its tokens, which skips what no query of a block sees,
        takes less than a masked one with its own queries, which reads a mask and skips nothing."""
        num_own = len(self.own)
        num_above = len(self.prefix)
        skips_blocks = num_own > num_above + _BLOCK_KEYS
        return num_own > _MUCH_LONGER * num_above or skips_blocks

    def blocks(self) -> Iterator["_Segment"]:
        """Cut it into pieces of `_BLOCK_QUERIES` tokens at most."""
        for start in range(0, len(self.own), _BLOCK_QUERIES):
            prefix = np.concatenate([self.prefix, self.own[:start]])
            yield _Segment(prefix, self.own[start : start + _BLOCK_QUERIES])


def _whole_length(segment: _Segment) -> int:
    return len(segment.prefix) + len(segment.own)


def _prefix_length(segment: _Segment) -> int:
    return len(segment.prefix)


def _own_length(segment: _Segment) -> int:
    return len(segment.own)


def _up_to_a_quarter_more(shortest: int) -> float:
    return max(shortest * 1.25, 4)


def _few_tokens_more(shortest: int) -> float:
    """Bound the padding in front of branches, for which each needs a mask of its own."""
    return shortest + 16


def _similar(
    segments: Sequence[_Segment],
    length_of: Callable[[_Segment], int],
    longest: Callable[[int], float],
) -> list[list[_Segment]]:
    """Group segments of similar length: each group ascends from the length of its first segment to
    at most `longest` of that."""
    groups: list[list[_Segment]] = []
    limit = 0.0
    for segment in sorted(segments, key=length_of):
        length = length_of(segment)
        if not groups or length > limit:
            groups.append([])
            limit = longest(length)
        groups[-1].append(segment)
    return groups


class _Planner:
    """Adds up calls and where their outputs are. Keys are those of the whole row."""

    def __init__(self, part: RowPart, device: torch.device, dtype: torch.dtype):
        self._part = part
        self._device = device
        self._dtype = dtype
        self._buckets: list[Bucket] = []
        self._order = np.zeros(part.split.num_own, np.int64)
        self._num_outputs = 0
        self._masks: dict[int, torch.Tensor] = {}

    def add_causal(self, segments: Sequence[_Segment]) -> None:
        """Add a call in which queries of all tokens see keys of all tokens causally."""
        paths = [np.concatenate([segment.prefix, segment.own]) for segment in segments]
        longest = max(len(path) for path in paths)
        for place, segment in enumerate(segments):
            self._place(segment, place * longest + len(segment.prefix))
        padded = [_padded(path, longest) for path in paths]
        keys = self._rows(padded)
        queries = keys
        if not self._part.split.is_whole:
            queries = self._rows([self._own_places(path) for path in padded])
        self._buckets.append(Bucket(queries, keys, None))
        self._num_outputs += len(segments) * longest

    def add_masked(self, segments: Sequence[_Segment]) -> None:
        """Add a call in which queries of branches see keys of their prefixes and their own."""
        longest = max(len(segment.own) for segment in segments)
        longest_prefix = max(len(segment.prefix) for segment in segments)
        queries = []
        keys = []
        for place, segment in enumerate(segments):
            self._place(segment, place * longest)
            own = _padded(segment.own, longest)
            queries.append(self._own_places(own))
            keys.append(np.concatenate([_padded(segment.prefix, longest_prefix), own]))
        prefix_lengths = np.array([len(segment.prefix) for segment in segments])
        mask = self._mask(prefix_lengths, longest_prefix, longest)
        self._buckets.append(Bucket(self._rows(queries), self._rows(keys), mask))
        self._num_outputs += len(segments) * longest

    def plan(self) -> BucketPlan:
        """Return all calls."""
        is_in_order = self._num_outputs == len(self._order) and np.array_equal(
            self._order, np.arange(self._num_outputs)
        )
        order = None
        if not is_in_order:
            order = to_device(torch.from_numpy(self._order), self._device)
        order_of_keys = None
        if not self._part.split.is_whole:
            order_of_keys = self._part.order_of_keys(self._device)
        return BucketPlan(self._buckets, order, order_of_keys)

    def _own_places(self, rows: np.ndarray) -> np.ndarray:
        """Return where tokens of the row, int64, are among those of this rank; padding is
        anywhere."""
        if self._part.split.is_whole:
            return rows
        places: np.ndarray = self._part.split.places[rows]
        return places

    def _place(self, segment: _Segment, first: int) -> None:
        """Say that the outputs of a segment begin at `first` of the next call's."""
        outputs = self._num_outputs + first + np.arange(len(segment.own))
        self._order[self._own_places(segment.own)] = outputs

    def _rows(self, sequences: Sequence[np.ndarray]) -> _Rows:
        """Join sequences of one length, int64 [length] each."""
        batch = len(sequences)
        length = len(sequences[0])
        index = np.concatenate(sequences)
        start = int(index[0])
        is_adjacent = np.array_equal(index, np.arange(start, start + len(index)))
        if is_adjacent:
            return _Rows(None, start, batch, length)
        return _Rows(to_device(torch.from_numpy(index), self._device), start, batch, length)

    def _mask(self, prefix_lengths: np.ndarray, longest_prefix: int, longest: int) -> torch.Tensor:
        """Hide padding of prefixes, and later tokens of a branch: 0 or minus infinity.

        prefix_lengths: int [batch]. Returns [batch or 1, 1, longest, longest_prefix + longest]."""
        if (prefix_lengths == longest_prefix).all():
            return self._mask_of_one_length(longest_prefix, longest)
        above = np.arange(longest_prefix) < prefix_lengths[:, None]
        own = np.tri(longest, dtype=bool)
        sees = np.concatenate(
            [
                np.broadcast_to(above[:, None], (len(above), longest, longest_prefix)),
                np.broadcast_to(own, (len(above), longest, longest)),
            ],
            2,
        )
        mask = torch.zeros(sees.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(~sees), -torch.inf)
        return to_device(mask[:, None], self._device)

    def _mask_of_one_length(self, num_above: int, num_own: int) -> torch.Tensor:
        """Hide later tokens of branches behind as many tokens each: fp [1, 1, own, above + own].

        It is the end of the largest one so far: calls of many prefixes have one between them."""
        length = num_above + num_own
        largest = self._masks.get(num_own)
        if largest is None or largest.size(1) < length:
            own = np.tri(num_own, dtype=bool)
            mask = torch.zeros(num_own, length, dtype=self._dtype)
            mask[:, num_above:].masked_fill_(torch.from_numpy(~own), -torch.inf)
            largest = to_device(mask, self._device)
            self._masks[num_own] = largest
        return largest[None, None, :, largest.size(1) - length :]


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Repeat row 0 until there are `length`."""
    return np.concatenate([rows, np.zeros(length - len(rows), np.int64)])


def whole_row(tree: RowTree) -> RowPart:
    """Return a row that one rank computes, without padding."""
    return RowPart(split_row(tree, 1, 1))


def part_of(packed: Any) -> RowPart:
    """Return what `build_microbatch` left on the host; without it, sequences of which each is a
    segment, whose lengths are asked of the device."""
    part = row_of(packed).part
    if part is None:
        lengths = np.diff(packed.cu_seqlens_q.tolist())
        part = whole_row(RowTree(lengths, np.full(len(lengths), -1), ()))
    return part


def planned_buckets(packed: Any, query: torch.Tensor) -> BucketPlan:
    """Return the calls for a row, which are the same in every layer."""
    row = row_of(packed)
    if row.bucket_plan is None:
        row.bucket_plan = plan_buckets(part_of(packed), query.device, query.dtype)
    return row.bucket_plan


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Drop-in core attention without Transformer Engine. Causal; GQA and MLA value sizes.

    Raises ValueError for a window or a learnable softmax."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **__: Any,
    ):
        super().__init__(config=config)
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError("sliding windows and learnable softmax need Transformer Engine")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within samples: q, k, v [T / C, heads, d], packed, to [T / C, heads * d_v].

        Collective where ranks share rows."""
        plan = planned_buckets(packed_seq_params, query)
        if plan.order_of_keys is not None:
            key = gather_tokens(key, plan.order_of_keys)
            value = gather_tokens(value, plan.order_of_keys)
        return self.attend(plan, query, key, value)

    def attend(
        self, plan: BucketPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend within samples: q [T / C, heads, d], keys and values of the whole row [T, heads,
        d], to [T / C, heads * d_v]."""
        outputs = []
        for bucket in plan.buckets:
            q = bucket.queries.take(query)
            k = bucket.keys.take(key)
            v = bucket.keys.take(value)
            found = self._attend(q, k, v, bucket.mask)
            outputs.append(found.transpose(1, 2).flatten(0, 1))  # from [b, heads, s, d_v]
        output = outputs[0]
        if len(outputs) > 1:
            output = torch.cat(outputs)
        if plan.order is not None:
            output = output.index_select(0, plan.order)
        return output.flatten(1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Call SDPA, causally without a mask: [b, heads, s, d] to [b, heads, s, d_v]."""
        enable_gqa = q.size(1) != k.size(1)
        if mask is None:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=enable_gqa
            )
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=enable_gqa
        )
