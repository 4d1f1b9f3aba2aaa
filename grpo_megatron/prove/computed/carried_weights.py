"""Made-up weights through a weight stream: one sender, receivers that pass them on."""

import time

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from grpo_megatron.prove.requests import CarriedWeights, CarryWeights
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.carriers import message_device
from grpo_megatron.weights.publish_plan import HeldBox, Stream, plan_streams
from grpo_megatron.weights.tensor_entry import TensorEntry
from grpo_megatron.weights.transfer import StreamReceiver, StreamSender

_NUM_TENSORS = 16
_NUM_COLUMNS = 1024
_BUCKET_BYTES = 256 << 20
_NUM_PUBLISHES = 2
"""The first connects what is connected late; the second is timed."""
_LIMIT_S = 60.0


class _Found(msgspec.Struct, frozen=True):
    """What a receiver found in the last publish."""

    digests: dict[str, str]
    changed: list[str]


def send(request: CarryWeights, store: Store, host: str) -> CarriedWeights:
    """Send the weights, twice, and collect what the receivers found.

    store: where the members of this request meet. Raises TransferError."""
    _take_gpu(request, 0)
    tensors = _tensors(request.mib, message_device(request.carrier))
    stream = _stream(request)
    sender = StreamSender(0, stream, 0, host, request.carrier, _LIMIT_S)
    _, port = sender.listen()
    store.set("port", str(port))
    sender.join((host, port))
    links = sender.group.links()

    def piece_of(name: str, box: Box) -> torch.Tensor:
        tensor = tensors[name]
        return box.view_in(whole_box(tensor.shape), tensor)

    receivers = range(1, len(request.gpus))
    seconds = 0.0
    for publish in range(_NUM_PUBLISHES):
        started = time.perf_counter()
        for bucket in range(len(stream.buckets())):
            sender.send(publish, bucket, piece_of)
        sender.finish()
        store.wait([_key(publish, rank) for rank in receivers])
        seconds = time.perf_counter() - started
    received = []
    changed: list[str] = []
    for rank in receivers:
        found = msgspec.json.decode(store.get(_key(_NUM_PUBLISHES - 1, rank)), type=_Found)
        received.append(found.digests)
        changed += found.changed
    answer = CarriedWeights(
        links=dict(links),
        seconds=seconds,
        sent=dict(sender.digests),
        received=received,
        changed=changed,
    )
    sender.close()
    return answer


def receive(request: CarryWeights, store: Store, host: str, rank: int) -> None:
    """Receive what rank 0 sends, and tell it what came; `rank` counts members.

    Raises TransferError."""
    _take_gpu(request, rank)
    address = (host, int(store.get("port")))
    stream = _stream(request)
    receiver = StreamReceiver(0, stream, rank - 1, address, host, request.carrier, _LIMIT_S)
    for publish in range(_NUM_PUBLISHES):
        receiver.receive(publish, lambda tensors: None)
        found = _Found(receiver.digests, receiver.changed)
        store.set(_key(publish, rank), msgspec.json.encode(found).decode())
    del receiver


def _key(publish: int, rank: int) -> str:
    return f"received/{publish}/{rank}"


def _take_gpu(request: CarryWeights, rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(request.gpus[rank])


def _shape(mib: int) -> tuple[int, int]:
    """Return the shape of one tensor, in bfloat16."""
    num_elements = (mib << 20) // _NUM_TENSORS // torch.bfloat16.itemsize
    return num_elements // _NUM_COLUMNS, _NUM_COLUMNS


def _tensors(mib: int, device: torch.device) -> dict[str, torch.Tensor]:
    made = {}
    for number in range(_NUM_TENSORS):
        tensor = torch.randn(_shape(mib), dtype=torch.bfloat16, device=device)
        made[_name(number)] = tensor
    return made


def _name(number: int) -> str:
    return f"weight.{number}"


def _stream(request: CarryWeights) -> Stream:
    """Return the plan, which every member makes for itself."""
    shape = _shape(request.mib)
    entries: list[TensorEntry] = []
    for number in range(_NUM_TENSORS):
        entries.append(TensorEntry(_name(number), "bfloat16", shape))
    held = [HeldBox(entry, whole_box(shape)) for entry in entries]
    kept = {entry.name: [whole_box(shape)] for entry in entries}
    [stream] = plan_streams([held], [kept] * (len(request.gpus) - 1), _BUCKET_BYTES)
    return stream
