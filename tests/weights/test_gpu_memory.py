"""Handles of GPU memory, as far as a machine without a GPU can tell; the rest: tests/device."""

from __future__ import annotations

import inspect
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.multiprocessing import reductions

from grpo_megatron.weights import gpu_memory
from grpo_megatron.weights.carriers import listening_store
from grpo_megatron.weights.gpu_memory import HANDLE_BYTES, Reach, opened


def test_torch_still_names_what_a_handle_is_made_of():
    names = set(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    of_handle = set(gpu_memory._Handle.__struct_fields__) - {"gpu", "num_bytes"}
    given = {"tensor_cls", "tensor_size", "tensor_stride", "storage_cls", "dtype"}
    assert names == of_handle | given | {"storage_device", "requires_grad"}


@pytest.mark.parametrize("content", [b"", b"\x05", (9).to_bytes(8, "little") + b"not packed"])
def test_what_is_no_handle_is_refused(content):
    message = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
    if content:
        message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="no handle of GPU memory"):
        opened(message)


def test_nobody_reads_memory_of_a_gpu_where_there_is_none():
    timeout = timedelta(seconds=60)
    first = listening_store("127.0.0.1", 2, timeout)
    second = TCPStore("127.0.0.1", first.port, None, is_master=False, timeout=timeout)
    found: dict[int, Reach] = {}

    def meet(rank: int, store: TCPStore) -> None:
        found[rank] = Reach(store, rank, 2)

    members = enumerate((first, second))
    threads = [threading.Thread(target=meet, args=member) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(found[rank].reads(1 - rank, rank) for rank in (0, 1))
