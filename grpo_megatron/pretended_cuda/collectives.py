"""NCCL, which takes tensors of a GPU only, over gloo, which takes what they hold."""

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo_megatron.pretended_cuda.tensor import PretendedTensor

_GLOO = "cpu:gloo,cuda:gloo"
_groups: set[str] = set()
"""Names of the groups that were asked for with NCCL."""


def install() -> None:
    """Let `backend="nccl"` make groups over gloo that refuse tensors of the host."""
    c10d: Any = distributed_c10d
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make(
        size: int,
        rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        group_name: str,
        backend_options: Any = None,
        **settings: Any,
    ) -> Any:
        is_nccl = str(backend).lower() == "nccl"
        if is_nccl:
            backend = _GLOO
            backend_options = None
            _groups.add(group_name)
        group, own_store = make_group(
            size,
            rank,
            ranks,
            backend,
            store,
            group_name,
            backend_options=backend_options,
            **settings,
        )
        if is_nccl and group in c10d._world.pg_map:
            c10d._world.pg_map[group] = ("nccl", c10d._world.pg_map[group][1])
        return group, own_store

    device_of_objects = c10d._get_object_coll_device

    @functools.wraps(device_of_objects)
    def device_type(group: Any = None) -> Any:
        group = group or c10d._get_default_group()
        if group.group_name in _groups:
            return "cuda"
        return device_of_objects(group)

    pretended: Any = dist
    pretended.ProcessGroupNCCL = PretendedNccl
    c10d._new_process_group_helper = make
    c10d._get_object_coll_device = device_type


class PretendedNccl:
    """Takes the place of `torch.distributed.ProcessGroupNCCL`, for messages between two members."""

    class Options:
        """What of NCCL's own is set."""

        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: "PretendedNccl.Options"):
        gloo: Any = dist.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._timeout = options._timeout
        gloo_options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(store, rank, size, gloo_options)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "PretendedWork":
        """Begin to send a tensor of a pretended GPU."""
        return PretendedWork(self._group.send(_held("send", tensors), to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "PretendedWork":
        """Begin to fill a tensor of a pretended GPU."""
        return PretendedWork(self._group.recv(_held("recv", tensors), source, tag))

    def abort(self) -> None:
        """Give up what is under way."""
        self._group = None


class PretendedWork:
    """A message on its way."""

    def __init__(self, work: Any):
        self._work = work
        self._is_completed = False

    def is_completed(self) -> bool:
        """Whether it is there; gloo only finds out by waiting."""
        if not self._is_completed:
            self._work.wait()
            self._is_completed = True
        return True

    def wait(self) -> None:
        """Let what is computed next wait: it is there."""
        self.is_completed()


def _held(func: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    held = []
    for tensor in tensors:
        if not isinstance(tensor, PretendedTensor):
            raise RuntimeError(
                f"No backend type associated with device type cpu: {func} was given a tensor of "
                "the host, and NCCL takes those of a GPU only"
            )
        held.append(tensor.held)
    return held


def check(func: Any, args: tuple[Any, ...], on_host: list[torch.Tensor]) -> None:
    """Raise RuntimeError where a tensor of the host is given to NCCL."""
    if not on_host:
        return
    for argument in args:
        if not isinstance(argument, torch.ScriptObject):
            continue
        name = _name_of_group(argument)
        if name in _groups:
            raise RuntimeError(
                f"No backend type associated with device type cpu: {func} was given a tensor of "
                "the host, and NCCL takes those of a GPU only"
            )


def _name_of_group(argument: torch.ScriptObject) -> str | None:
    try:
        group: Any = dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # another class: an operation of a reduction
        return None
    return str(group.group_name)
