"""This process as one rank of a world of any size, alone.

Megatron's groups are made on torch's fake backend, which answers at once and moves nothing."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from grpo_megatron.trainer.megatron import cpu_platform, platform  # isort: skip  # before Megatron
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trace.values import DEVICE
from grpo_megatron.trainer.megatron import process_groups
from grpo_megatron.trainer.megatron.process_groups import RankInfo


@contextmanager
def as_rank(layout: TrainerConfig, rank: int, *, on_gpu: bool) -> Iterator[None]:
    """Let this process be `rank` of the layout's world inside of the block.

    on_gpu: the code takes the branches of a machine with GPUs."""
    if dist.is_initialized():
        process_groups.shutdown()
    with ExitStack() as stack:
        for target, name, stand_in in _replacements(on_gpu):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        process_groups.initialize(layout, RankInfo(rank, 0, layout.num_ranks), FakeStore())
        process_groups.seed_everything(0)
        try:
            yield
        finally:
            process_groups.shutdown()


def _replacements(on_gpu: bool) -> list[tuple[Any, str, Any]]:
    """Return what is replaced while this process plays a rank: owner, name, stand-in."""
    host = DEVICE
    if on_gpu:
        host = torch.device("cpu")
    found: list[tuple[Any, str, Any]] = [
        (dist, "new_group", _fake_group(dist.new_group)),
        (dist, "init_process_group", _fake_world(dist.init_process_group)),
        (dist, "all_gather_object", _everyone_says_the_same),
        (dist, "batch_isend_irecv", _one_by_one),
        (torch.Tensor, "type", _named_as_on_a_gpu(torch.Tensor.type)),
        (torch.Tensor, "cuda", _moved_to_the_device),
        (torch, "tensor", _with_numbers(torch.tensor, host)),
        (torch.cuda, "current_device", _the_device),
        (torch.cuda, "set_device", _nothing),
        (cpu_platform, "CPU", DEVICE),  # what `device="cuda"` becomes
    ]
    if on_gpu:  # without what gloo needs
        for name in ("_gather_along_first_dim", "_reduce_scatter_along_first_dim"):
            found.append((mappings, name, inspect.unwrap(getattr(mappings, name))))
    for module in _trainer_modules():
        if getattr(module, "device", None) is platform.device:
            found.append((module, "device", _the_device))
        if on_gpu and hasattr(module, "HAS_CUDA"):
            found.append((module, "HAS_CUDA", True))
    return found


def _trainer_modules() -> list[Any]:
    prefix = "grpo_megatron.trainer."
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefix)]


def _the_device() -> torch.device:
    return DEVICE


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **settings: Any) -> Any:
        return new_group(*args, **{**settings, "backend": "fake"})

    return make


def _fake_world(init: Callable[..., Any]) -> Callable[..., Any]:
    def make(backend: str, **settings: Any) -> Any:
        return init("fake", **settings)

    return make


def _everyone_says_the_same(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)


def _one_by_one(operations: list[dist.P2POp]) -> list[Any]:
    """`batch_isend_irecv`, which asks for a backend of the tensors' device."""
    works = []
    for operation in operations:
        works.append(operation.op(operation.tensor, operation.peer, operation.group))
    return works


def _named_as_on_a_gpu(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizer compares `tensor.type()` with 'torch.cuda.FloatTensor'."""

    def name(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if tensor.is_meta and not args and not settings:
            kind = str(tensor.dtype)
            return _TYPE_NAMES[kind]
        return type_of(tensor, *args, **settings)

    return name


_TYPE_NAMES = {
    "torch.float32": "torch.cuda.FloatTensor",
    "torch.bfloat16": "torch.cuda.BFloat16Tensor",
    "torch.float16": "torch.cuda.HalfTensor",
    "torch.float64": "torch.cuda.DoubleTensor",
    "torch.int64": "torch.cuda.LongTensor",
    "torch.int32": "torch.cuda.IntTensor",
    "torch.uint8": "torch.cuda.ByteTensor",
    "torch.bool": "torch.cuda.BoolTensor",
}


def _moved_to_the_device(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.to(DEVICE)


def _with_numbers(
    make: Callable[..., torch.Tensor], default: torch.device
) -> Callable[..., torch.Tensor]:
    """Return what takes the place of `torch.tensor`, which makes tensors on the meta device without
    asking a mode, so that their numbers are lost.

    default: the device of tensors for which none is named."""

    def tensor(data: Any, *, device: Any = None, **settings: Any) -> torch.Tensor:
        if isinstance(data, list):
            data = tree_map_only(torch.Tensor, torch.Tensor.tolist, data)
        made = make(data, device="cpu", **settings)
        if device is None:
            device = default
        elif str(device).startswith("cuda"):
            device = DEVICE
        return made.to(device)

    return tensor
