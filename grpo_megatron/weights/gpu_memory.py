"""CUDA IPC: one process reads the GPU memory of another by a handle, which is a few bytes.

A handle opens memory only on the node where it was made, in a process that sees that GPU, and
containers and drivers may refuse it. So members of a group try it before they rely on it (`Reach`).
Handles are packed and read here, by `msgspec`: nothing that travels is unpickled."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import reductions

HANDLE_BYTES = 4096
"""Of the message that carries a handle: its length, the handle, and nothing."""
_LENGTH_BYTES = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    """What opens memory of another process: the GPU, and arguments of torch's
    `rebuild_cuda_tensor` by their names."""

    gpu: str
    num_bytes: int
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class _Member(msgspec.Struct, frozen=True):
    """Where a process is, and numbers in its GPU's memory by which others try to read it."""

    node: str = ""
    gpu: str = ""
    """Empty: the process has none."""
    sample: bytes = b""


def handle_of(data: torch.Tensor) -> torch.Tensor:
    """Pack a handle of `data`, uint8 [n] on this process's GPU, into uint8 [HANDLE_BYTES] on the
    host. `data` must stay, unchanged, until the other has copied it. Raises RuntimeError where the
    driver gives none."""
    rebuild, values = reductions.reduce_tensor(data)
    arguments = inspect.signature(rebuild).bind(*values).arguments
    handle = _Handle(
        gpu=_gpu_name(data.device.index),
        num_bytes=data.numel(),
        tensor_offset=arguments["tensor_offset"],
        storage_handle=arguments["storage_handle"],
        storage_size_bytes=arguments["storage_size_bytes"],
        storage_offset_bytes=arguments["storage_offset_bytes"],
        ref_counter_handle=arguments["ref_counter_handle"],
        ref_counter_offset=arguments["ref_counter_offset"],
        event_handle=arguments["event_handle"],
        event_sync_required=arguments["event_sync_required"],
    )
    packed = msgspec.msgpack.encode(handle)
    if len(packed) > HANDLE_BYTES - _LENGTH_BYTES:
        raise RuntimeError(f"a handle of GPU memory has {len(packed)} bytes")
    message = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
    content = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return message


def opened(message: torch.Tensor) -> torch.Tensor:
    """Return the memory behind a handle, uint8 [n] on a GPU; `message` is what `handle_of` made.

    Copy it and let it go: its owner waits. Raises RuntimeError where it cannot be opened."""
    content = bytes(message.numpy())
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        handle = msgspec.msgpack.decode(content[_LENGTH_BYTES:end], type=_Handle)
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"what arrived is no handle of GPU memory: {error}") from error
    visible = _visible_gpus()
    if handle.gpu not in visible:
        raise RuntimeError(f"this process does not see the GPU {handle.gpu}")
    rebuilt: torch.Tensor = reductions.rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([handle.num_bytes]),
        tensor_stride=(1,),
        tensor_offset=handle.tensor_offset,
        storage_cls=torch.UntypedStorage,
        dtype=torch.uint8,
        storage_device=visible.index(handle.gpu),
        storage_handle=handle.storage_handle,
        storage_size_bytes=handle.storage_size_bytes,
        storage_offset_bytes=handle.storage_offset_bytes,
        requires_grad=False,
        ref_counter_handle=handle.ref_counter_handle,
        ref_counter_offset=handle.ref_counter_offset,
        event_handle=handle.event_handle,
        event_sync_required=handle.event_sync_required,
    )
    return rebuilt


class Reach:
    """Which members of a group can read which others' GPU memory, tried with 8 numbers each.

    Collective over the members, who meet at `store`; RuntimeError where one does not come."""

    def __init__(self, store: TCPStore, rank: int, size: int):
        members = PrefixStore("gpu_memory", store)
        sample = _sample(rank)  # kept until everybody has tried
        members.set(f"member/{rank}", msgspec.json.encode(_described(sample)).decode())
        readable = []
        own = _described(None)
        for other in range(size):
            member = msgspec.json.decode(members.get(f"member/{other}"), type=_Member)
            if other != rank and _can_read(own, member, other):
                readable.append(other)
        members.set(f"readable/{rank}", msgspec.json.encode(readable).decode())
        self._readable: list[Sequence[int]] = []
        for other in range(size):
            found = msgspec.json.decode(members.get(f"readable/{other}"), type=list[int])
            self._readable.append(found)

    def reads(self, reader: int, owner: int) -> bool:
        """Whether rank `reader` can read the memory of rank `owner`."""
        return owner in self._readable[reader]


def _described(sample: torch.Tensor | None) -> _Member:
    if not torch.cuda.is_available():
        return _Member()
    node = _BOOT_ID.read_text().strip()
    gpu = _gpu_name(torch.cuda.current_device())
    if sample is None:
        return _Member(node, gpu)
    try:
        packed = bytes(handle_of(sample).numpy())
    except RuntimeError:
        return _Member()  # the driver gives no handles
    return _Member(node, gpu, packed)


def _sample(rank: int) -> torch.Tensor | None:
    """Return numbers that no other rank of the group has."""
    if not torch.cuda.is_available():
        return None
    return torch.full((8,), rank % 251 + 1, dtype=torch.uint8, device="cuda")


def _can_read(own: _Member, member: _Member, rank: int) -> bool:
    """Whether this process finds in the memory of `member` what `rank` has written there."""
    is_near = bool(own.gpu) and own.node == member.node and member.gpu in _visible_gpus()
    if not is_near or not member.sample:
        return False
    try:
        message = torch.frombuffer(bytearray(member.sample), dtype=torch.uint8)
        found = opened(message).cpu()
    except RuntimeError:
        return False
    return found.tolist() == [rank % 251 + 1] * 8


def _visible_gpus() -> list[str]:
    """Return names of this process's GPUs, by index; none where there is no GPU."""
    if not torch.cuda.is_available():
        return []
    return [_gpu_name(index) for index in range(torch.cuda.device_count())]


def _gpu_name(index: int) -> str:
    """Return a GPU's name over all processes of a node: its UUID."""
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid)
