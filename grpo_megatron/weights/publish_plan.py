"""Who sends which part of which tensor to whom: trainer shards cut to what engine workers keep.

    what trainer ranks hold (boxes) ─┐
                                     ├─ plan_streams ─> streams ─> buckets ─> messages
    what engine workers keep (boxes) ┘

Workers that keep the same parts, such as worker 1 of every replica, are one *stream*: trainer ranks
send to the first of them, and each passes on what it gets to the next, so the trainer sends
everything once, however many replicas there are. Both sides derive buckets and messages from the
stream; nothing that travels says where it belongs.

An example: a bfloat16 matrix "w" [4, 6]. Two trainer ranks hold two rows each; two replicas have
two workers each, which keep three columns each. A box is `start + shape`:

    HeldBox    of rank 0     w  0,0 + 2,6
               of rank 1     w  2,0 + 2,6
    Kept       of worker 0   {"w": [0,0 + 4,3]}      # of replica 0
               of worker 1   {"w": [0,3 + 4,3]}
               of worker 2   {"w": [0,0 + 4,3]}      # of replica 1
               of worker 3   {"w": [0,3 + 4,3]}

    Stream     for workers 0, 2                      # there is another one, for workers 1, 3
      Part     w  0,0 + 4,3                          # what they keep
        Piece  0,0 + 2,3 of rank 0                   # what rank 0 has of that
        Piece  2,0 + 2,3 of rank 1
    Bucket     0: that part                          # of parts that travel together
      Message  of rank 0: header, Piece, digest      # bytes 0 to 31, 32 to 43, 48 to 63
      Message  of rank 1: header, Piece, digest

Rank 0 sends its message to worker 0, which passes it on to worker 2; so does rank 1. Either worker
then has both pieces of its part, and loads it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.plan.publishing import MIN_BUCKET_BYTES, bucket_bytes
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.carrier_names import Carrier
from grpo_megatron.weights.tensor_entry import ALIGNMENT, TensorEntry, grouped

HEADER_BYTES = 32
"""Four int64: publish, bucket, bytes, status."""
DIGEST_BYTES = 16
"""Of each piece, behind the last of them."""

Kept = dict[str, list[Box]]
"""The boxes that an engine worker keeps of each tensor; one that it does not need is absent."""


class HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor that a trainer rank holds."""

    tensor: TensorEntry
    box: Box


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The part of a box that one trainer rank sends."""

    sender: int
    box: Box


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor that the workers of a stream keep, and the pieces that it comes in."""

    tensor: TensorEntry
    box: Box
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.box.num_elements * self.tensor.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """What one sender contributes to a bucket: a header, its pieces, their digests.

    `offsets`: where each piece starts, in bytes."""

    sender: int
    pieces: tuple[tuple[Part, Box], ...]
    offsets: tuple[int, ...]
    digests_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole message."""
        return self.digests_offset + DIGEST_BYTES * len(self.pieces)

    def header(self, data: torch.Tensor) -> torch.Tensor:
        """View the header of a message, uint8 [num_bytes], as int64 [4]."""
        return data[:HEADER_BYTES].view(torch.int64)

    def digests(self, data: torch.Tensor) -> torch.Tensor:
        """View the digests in a message as int64 [pieces, 2]."""
        return data[self.digests_offset :].view(torch.int64).view(-1, 2)

    def views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """View the pieces in a message, each of the shape of its box."""
        found = []
        for (part, box), start in zip(self.pieces, self.offsets, strict=True):
            dtype = part.tensor.torch_dtype
            own = data[start : start + box.num_elements * dtype.itemsize]
            found.append(own.view(dtype).view(box.shape))
        return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parts that travel together, in one message of each sender that has something of them."""

    parts: tuple[Part, ...]
    messages: tuple[Message, ...]


class Stream(msgspec.Struct, frozen=True):
    """Everything that one or several engine workers with the same parts receive, in order.

    `workers`: numbers of the workers, counted over all replicas, in the order in which they pass
    it on."""

    workers: tuple[int, ...]
    parts: tuple[Part, ...]
    bucket_bytes: int

    @property
    def senders(self) -> list[int]:
        """The trainer ranks that send something, ascending."""
        found = set()
        for part in self.parts:
            for piece in part.pieces:
                found.add(piece.sender)
        return sorted(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def buckets(self) -> list[Bucket]:
        """Divide the parts; those of one tensor stay together, and a large one is alone."""
        tensors: list[list[Part]] = []
        for part in self.parts:
            if tensors and tensors[-1][0].tensor.name == part.tensor.name:
                tensors[-1].append(part)
            else:
                tensors.append([part])
        sizes = []
        for parts in tensors:
            sizes.append(sum(part.num_bytes for part in parts))
        buckets = []
        for group in grouped(sizes, self.bucket_bytes):
            members: list[Part] = []
            for number in group:
                members += tensors[number]
            buckets.append(Bucket(tuple(members), _messages(members)))
        return buckets


class OpenedStream(msgspec.Struct, frozen=True):
    """A stream, and where its members find the first sender."""

    host: str
    port: int
    carrier: Carrier
    stream: Stream
    delta: bool = False
    """Whether messages may come as changes to those of the publish before."""


class SentWeights(msgspec.Struct):
    """What trainer ranks sent in one publish."""

    digests: dict[str, str] = {}
    """Of each message, by `message_key`."""
    num_bytes: int = 0
    """Of all messages."""
    num_sent_bytes: int = 0
    """Of what was sent in their place: less where only changes travel."""


def _messages(parts: Sequence[Part]) -> tuple[Message, ...]:
    """Return one message for each sender of the bucket that has `parts`."""
    of_sender: dict[int, list[tuple[Part, Box]]] = {}
    for part in parts:
        for piece in part.pieces:
            of_sender.setdefault(piece.sender, []).append((part, piece.box))
    messages = []
    for sender, pieces in sorted(of_sender.items()):
        end = HEADER_BYTES
        offsets = []
        for part, box in pieces:
            offsets.append(end)
            num_bytes = box.num_elements * part.tensor.torch_dtype.itemsize
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        messages.append(Message(sender, tuple(pieces), tuple(offsets), end))
    return tuple(messages)


def message_key(stream: int, bucket: int, sender: int) -> str:
    """Name a message of a publish."""
    return f"{stream}/{bucket}/{sender}"


def wrong_messages(sent: Mapping[str, str], received: Mapping[str, str], stream: int) -> list[str]:
    """Name the messages of a stream that a worker did not receive as they were sent.

    sent, received: digest of each message, by `message_key`."""
    wrong = []
    for key, digest in sent.items():
        if key.startswith(f"{stream}/") and received.get(key) != digest:
            wrong.append(key)
    return wrong


def tensor_names(streams: Sequence[OpenedStream]) -> set[str]:
    """Return the names of all tensors of which something is sent."""
    names = set()
    for opened in streams:
        for part in opened.stream.parts:
            names.add(part.tensor.name)
    return names


def plan_streams(
    held: Sequence[Sequence[HeldBox]],
    kept: Sequence[Kept],
    max_bucket_bytes: int,
    min_bucket_bytes: int = MIN_BUCKET_BYTES,
) -> list[Stream]:
    """Decide which trainer rank sends what to which engine worker.

    held: of every trainer rank. kept: of every engine worker, replicas one after the other. Of
    several ranks that hold the same part, the one sends it that has the fewest bytes to send so
    far. Raises MismatchError where ranks describe a tensor differently, nobody holds a part, or a
    worker keeps nothing."""
    holders = _holders(held)
    load = [0] * len(held)
    streams = []
    for boxes, workers in _same_kept(kept).items():
        if not boxes:
            raise MismatchError(
                f"engine worker {workers[0]} keeps nothing of the trainer's weights"
            )
        parts = []
        for name, box in boxes:
            parts.append(_part(name, box, holders, load))
        num_bytes = sum(part.num_bytes for part in parts)
        size = bucket_bytes(num_bytes, len(workers), max_bucket_bytes, min_bucket_bytes)
        streams.append(Stream(tuple(workers), tuple(parts), size))
    return streams


def tensors_of(held: Sequence[Sequence[HeldBox]]) -> list[TensorEntry]:
    """Return all tensors that trainer ranks hold parts of, in checkpoint order."""
    return [tensor for tensor, _ in _holders(held).values()]


_Holders = dict[str, tuple[TensorEntry, dict[Box, list[int]]]]
"""By tensor name, in checkpoint order: the tensor, and the ranks that hold each part of it."""


def _holders(held: Sequence[Sequence[HeldBox]]) -> _Holders:
    found: _Holders = {}
    for rank, boxes in enumerate(held):
        for item in boxes:
            tensor, by_box = found.setdefault(item.tensor.name, (item.tensor, {}))
            if tensor != item.tensor:
                raise MismatchError(
                    f"trainer ranks describe {tensor.name!r} differently: {tensor.dtype} "
                    f"{tensor.shape}, and on rank {rank} {item.tensor.dtype} {item.tensor.shape}"
                )
            by_box.setdefault(item.box, []).append(rank)
    return {name: found[name] for name in sorted(found, key=checkpoint_order)}


def checkpoint_order(name: str) -> list[str | int]:
    """Sort key of a name: numbers by size, not by digits, so layer by layer, expert by expert."""
    key: list[str | int] = []
    for text in re.split(r"(\d+)", name):
        if text.isdigit():
            key.append(int(text))
        else:
            key.append(text)
    return key


def _same_kept(kept: Sequence[Kept]) -> dict[tuple[tuple[str, Box], ...], list[int]]:
    """Return workers by what they keep: (name, box) in checkpoint order."""
    groups: dict[tuple[tuple[str, Box], ...], list[int]] = {}
    for worker, boxes_by_name in enumerate(kept):
        wanted = []
        for name in sorted(boxes_by_name, key=checkpoint_order):
            for box in sorted(boxes_by_name[name]):
                wanted.append((name, box))
        groups.setdefault(tuple(wanted), []).append(worker)
    return groups


def _part(name: str, box: Box, holders: _Holders, load: list[int]) -> Part:
    """Find senders for a box, and add what they send to `load`."""
    if name not in holders:
        raise MismatchError(f"an engine worker keeps {name!r}, which the trainer does not have")
    tensor, by_box = holders[name]
    if not whole_box(tensor.shape).contains(box):
        raise MismatchError(f"an engine worker keeps {box} of {name!r}, which is {tensor.shape}")
    pieces = []
    missing = box.num_elements
    for held, ranks in by_box.items():
        common = box.intersect(held)
        if common is None:
            continue
        sender = min(ranks, key=lambda rank: (load[rank], rank))
        load[sender] += common.num_elements * tensor.torch_dtype.itemsize
        pieces.append(Piece(sender, common))
        missing -= common.num_elements
    if missing != 0:
        raise MismatchError(
            f"the trainer holds {box.num_elements - missing} of {box.num_elements} numbers of "
            f"{box} of {name!r}, which an engine worker keeps"
        )
    return Part(tensor, box, tuple(pieces))
