"""CUDA IPC between pretended GPUs: the handle is the path of a copy in the owner's memory.

The owner may not change what it shared until it was taken, so a copy is as good as the memory."""

import functools
import inspect
import os
import weakref
from typing import Any

import torch
from torch.multiprocessing import reductions

from grpo_megatron.pretended_cuda.tensor import PretendedTensor


def install() -> None:
    """Replace how torch makes handles of GPU memory, and opens them."""
    module: Any = reductions
    share = module.reduce_tensor
    open_shared = module.rebuild_cuda_tensor

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, PretendedTensor):
            return share(tensor)
        arguments = inspect.signature(open_shared).bind(
            tensor_cls=torch.Tensor,
            tensor_size=tensor.size(),
            tensor_stride=tensor.stride(),
            tensor_offset=0,
            storage_cls=torch.UntypedStorage,
            dtype=tensor.dtype,
            storage_device=tensor.device.index,
            storage_handle=_shared_copy(tensor).encode(),
            storage_size_bytes=tensor.held.nbytes,
            storage_offset_bytes=0,
            requires_grad=False,
            ref_counter_handle=b"",
            ref_counter_offset=0,
            event_handle=b"",
            event_sync_required=False,
        )
        return open_shared, arguments.args

    @functools.wraps(open_shared)
    def rebuild_cuda_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = inspect.signature(open_shared).bind(*args, **kwargs).arguments
        path = arguments["storage_handle"].decode()
        try:
            with open(path, "rb") as file:
                content = bytearray(file.read())
        except OSError as error:
            raise RuntimeError(f"CUDA error: invalid resource handle ({error})") from error
        held = torch.frombuffer(content, dtype=arguments["dtype"]).view(arguments["tensor_size"])
        return PretendedTensor(held, torch.device("cuda", arguments["storage_device"]))

    module.reduce_tensor = reduce_tensor
    module.rebuild_cuda_tensor = rebuild_cuda_tensor


def _shared_copy(tensor: PretendedTensor) -> str:
    """Path of a file in memory with what `tensor` holds; it goes with the tensor."""
    number = os.memfd_create("pretended_cuda")
    weakref.finalize(tensor, os.close, number)
    with os.fdopen(os.dup(number), "wb") as file:
        file.write(tensor.held.numpy().tobytes())
    return f"/proc/{os.getpid()}/fd/{number}"
