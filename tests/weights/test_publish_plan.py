"""Trainer shards cut to what engine workers keep."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import (
    DIGEST_BYTES,
    HEADER_BYTES,
    HeldBox,
    Part,
    Piece,
    Stream,
    checkpoint_order,
    plan_streams,
    tensors_of,
    wrong_messages,
)
from grpo_megatron.weights.tensor_entry import ALIGNMENT, TensorEntry

LIMIT = 1 << 30


def split(tensor: TensorEntry, dim: int, parts: int) -> list[HeldBox]:
    """Equal parts of a tensor along `dim`, by rank."""
    size = tensor.shape[dim] // parts
    held = []
    for rank in range(parts):
        start = [0] * len(tensor.shape)
        shape = list(tensor.shape)
        start[dim] = rank * size
        shape[dim] = size
        held.append(HeldBox(tensor, Box(tuple(start), tuple(shape))))
    return held


MATRIX = TensorEntry("layers.2.w", "float32", (8, 12))
NORM = TensorEntry("layers.10.norm", "bfloat16", (12,))


def test_columns_are_put_together_of_rows():
    held = [[item] for item in split(MATRIX, 0, 4)]
    columns = [item.box for item in split(MATRIX, 1, 2)]
    streams = plan_streams(held, [{MATRIX.name: [box]} for box in columns], LIMIT)
    assert [stream.workers for stream in streams] == [(0,), (1,)]
    for stream, box in zip(streams, columns, strict=True):
        [part] = stream.parts
        assert part.box == box
        assert [piece.sender for piece in part.pieces] == [0, 1, 2, 3]
        assert [piece.box.start for piece in part.pieces] == [
            (row, box.start[1]) for row in (0, 2, 4, 6)
        ]
        assert stream.num_bytes == 4 * 8 * 6


def test_the_example_of_the_module():
    w = TensorEntry("w", "bfloat16", (4, 6))
    held = [[HeldBox(w, Box((0, 0), (2, 6)))], [HeldBox(w, Box((2, 0), (2, 6)))]]
    left = Box((0, 0), (4, 3))
    right = Box((0, 3), (4, 3))
    kept = [{"w": [left]}, {"w": [right]}, {"w": [left]}, {"w": [right]}]
    stream, other = plan_streams(held, kept, LIMIT)
    assert stream.workers == (0, 2) and other.workers == (1, 3)
    pieces = (Piece(0, Box((0, 0), (2, 3))), Piece(1, Box((2, 0), (2, 3))))
    assert stream.parts == (Part(w, left, pieces),)
    [bucket] = stream.buckets()
    assert bucket.parts == stream.parts
    assert [message.sender for message in bucket.messages] == [0, 1]
    for message in bucket.messages:
        assert (message.offsets, message.digests_offset, message.num_bytes) == ((32,), 48, 64)


def test_parts_of_a_tensor_stay_together():
    """An engine loads a tensor once, also where a bucket has room for one part only."""
    held = [[HeldBox(MATRIX, whole_box(MATRIX.shape)), HeldBox(NORM, whole_box(NORM.shape))]]
    rows = [item.box for item in split(MATRIX, 0, 4)]
    kept = {MATRIX.name: [rows[0], rows[2]], NORM.name: [whole_box(NORM.shape)]}
    [stream] = plan_streams(held, [kept], 1, min_bucket_bytes=1)
    names = [[part.tensor.name for part in bucket.parts] for bucket in stream.buckets()]
    assert names == [[MATRIX.name, MATRIX.name], [NORM.name]]


def test_workers_that_keep_the_same_are_one_stream():
    held = [[HeldBox(MATRIX, whole_box(MATRIX.shape))]]
    top, bottom = [item.box for item in split(MATRIX, 0, 2)]
    kept = [{MATRIX.name: [top]}, {MATRIX.name: [bottom]}] * 3
    assert [s.workers for s in plan_streams(held, kept, LIMIT)] == [(0, 2, 4), (1, 3, 5)]
    kept = [{MATRIX.name: [top, bottom]}, {MATRIX.name: [bottom, top]}]
    assert [s.workers for s in plan_streams(held, kept, LIMIT)] == [(0, 1)]


def test_of_several_holders_the_one_with_the_least_to_send_sends():
    """Four ranks with everything, eight tensors, two streams: the work is spread evenly."""
    tensors = [TensorEntry(f"t{number}", "float32", (4, 4)) for number in range(8)]
    held = [[HeldBox(tensor, whole_box((4, 4))) for tensor in tensors]] * 4
    kept = [
        {t.name: [item] for t in tensors} for item in (Box((0, 0), (2, 4)), Box((2, 0), (2, 4)))
    ]
    sent = [0] * 4
    for stream in plan_streams(held, kept, LIMIT):
        for part in stream.parts:
            for piece in part.pieces:
                sent[piece.sender] += piece.box.num_elements
    assert sent == [32] * 4


def test_names_are_in_the_order_of_checkpoints():
    held = [[HeldBox(NORM, whole_box(NORM.shape)), HeldBox(MATRIX, whole_box(MATRIX.shape))]]
    assert [tensor.name for tensor in tensors_of(held)] == ["layers.2.w", "layers.10.norm"]
    assert sorted(["a.10", "a.9", "b.1"], key=checkpoint_order) == ["a.9", "a.10", "b.1"]


@pytest.mark.parametrize(
    ("held", "kept", "told"),
    [
        ([split(MATRIX, 0, 2)[:1]], {MATRIX.name: [whole_box(MATRIX.shape)]}, "holds 48 of 96"),
        (
            [split(MATRIX, 0, 1), split(MATRIX, 0, 2)],  # the same numbers in different parts
            {MATRIX.name: [whole_box(MATRIX.shape)]},
            "holds 192 of 96",
        ),
        ([split(MATRIX, 0, 1)], {"other": [Box((0,), (1,))]}, "'other', which the trainer"),
        ([split(MATRIX, 0, 1)], {MATRIX.name: [Box((0, 0), (8, 13))]}, "which is"),
        ([split(MATRIX, 0, 1)], {}, "engine worker 0 keeps nothing"),
        (
            [split(MATRIX, 0, 1), split(TensorEntry(MATRIX.name, "bfloat16", (8, 12)), 0, 1)],
            {MATRIX.name: [whole_box(MATRIX.shape)]},
            "describe 'layers.2.w' differently",
        ),
    ],
)
def test_what_does_not_fit_is_named(held, kept, told):
    with pytest.raises(MismatchError, match=told):
        plan_streams(held, [kept], LIMIT)


def test_messages_that_did_not_arrive_as_sent():
    sent = {"0/0/1": "a", "0/1/1": "b", "1/0/1": "c", "10/0/0": "d"}
    assert wrong_messages(sent, {"0/0/1": "a", "0/1/1": "b"}, 0) == []
    assert wrong_messages(sent, {"0/0/1": "a", "0/1/1": "x"}, 0) == ["0/1/1"]
    assert wrong_messages(sent, {}, 1) == ["1/0/1"]


@st.composite
def layouts(draw):
    """Tensors, split by a trainer of one layout and kept by engines of another."""
    tensors = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 8])))
        tensors.append(
            TensorEntry(f"t{number}", draw(st.sampled_from(["float32", "bfloat16"])), shape)
        )
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_workers = draw(st.sampled_from([1, 2, 4]))
    held: list[list[HeldBox]] = [[] for _ in range(num_ranks)]
    kept: list[dict[str, list[Box]]] = [{} for _ in range(num_workers)]
    for tensor in tensors:
        parts = draw(st.sampled_from([n for n in (1, 2, 4) if num_ranks % n == 0]))
        shards = split(tensor, draw(st.integers(0, 1)), parts)
        for rank in range(num_ranks):
            held[rank].append(shards[rank % parts])
        parts = draw(st.sampled_from([n for n in (1, 2, 4) if num_workers % n == 0]))
        shards = split(tensor, draw(st.integers(0, 1)), parts)
        for worker in range(num_workers):
            kept[worker][tensor.name] = [shards[worker % parts].box]
    return held, kept


@given(layout=layouts(), limit=st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_every_number_travels_once_and_fits_its_message(layout, limit):
    held, kept = layout
    streams = plan_streams(held, kept, limit)
    assert sorted(worker for stream in streams for worker in stream.workers) == list(
        range(len(kept))
    )
    for stream in streams:
        assert msgspec.json.decode(msgspec.json.encode(stream), type=Stream) == stream
        wanted = kept[stream.workers[0]]
        assert {part.tensor.name: [part.box] for part in stream.parts} == wanted
        buckets = stream.buckets()
        assert [part for bucket in buckets for part in bucket.parts] == list(stream.parts)
        for bucket in buckets:
            num_bytes = sum(part.num_bytes for part in bucket.parts)
            assert num_bytes <= limit or len(bucket.parts) == 1
            covered = {
                (part.tensor.name, part.box): torch.zeros(part.tensor.shape)
                for part in bucket.parts
            }
            for message in bucket.messages:
                data = torch.zeros(message.num_bytes, dtype=torch.uint8)
                end = HEADER_BYTES
                for (part, box), offset in zip(message.pieces, message.offsets, strict=True):
                    assert offset % ALIGNMENT == 0 and offset >= end
                    end = offset + box.num_elements * part.tensor.torch_dtype.itemsize
                    assert any(
                        item.box.contains(box)
                        for item in held[message.sender]
                        if item.tensor == part.tensor
                    )
                    seen = covered[part.tensor.name, part.box]
                    box.view_in(whole_box(part.tensor.shape), seen).add_(1)
                assert message.num_bytes == message.digests_offset + DIGEST_BYTES * len(
                    message.pieces
                )
                assert [view.shape for view in message.views(data)] == [
                    box.shape for _, box in message.pieces
                ]
                assert message.digests(data).shape == (len(message.pieces), 2)
            for (_, box), seen in covered.items():
                assert seen.sum() == box.num_elements and seen.max() == 1
