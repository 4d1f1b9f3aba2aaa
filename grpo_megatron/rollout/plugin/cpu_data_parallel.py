"""CPU: collectives that experts of data-parallel engines need: of unequal parts, and of integers.

Defect (vLLM 0.32.0, distributed/device_communicators/cpu_communicator.py): `AgRsAll2AllManager`,
which a CPU is given, calls `all_gatherv` and `reduce_scatterv`. `CpuCommunicator` has neither: a
sparse model of several data-parallel engines dies at its first request. Within tensor-parallel
groups it gathers by shared memory, which knows no integers, so that routes cannot be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def apply() -> None:
    """Give CPU communicators these collectives."""
    from vllm.distributed.device_communicators import cpu_communicator

    gather_numbers = cpu_communicator.CpuCommunicator.all_gather

    def all_gather(self: CpuCommunicator, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if input_.is_floating_point():
            numbers: torch.Tensor = gather_numbers(self, input_, dim)
            return numbers
        return _gather_integers(self, input_, dim)

    cpu_communicator.CpuCommunicator.all_gather = all_gather
    cpu_communicator.CpuCommunicator.all_gatherv = _all_gatherv
    cpu_communicator.CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: CpuCommunicator,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the tensors of all ranks, of `sizes[rank]` rows each."""
    assert dim == 0, "as vLLM's other communicators"
    if isinstance(input_, list):
        return [_gather_rows(self, tensor, sizes) for tensor in input_]
    return _gather_rows(self, input_, sizes)


def _gather_rows(
    communicator: CpuCommunicator, rows: torch.Tensor, sizes: Sequence[int] | None
) -> torch.Tensor:
    import torch

    if sizes is None:
        sizes = [len(rows)] * communicator.world_size
    most = max(sizes)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = communicator.all_gather(padded, dim=0).split(most)
    parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
    return torch.cat(parts)


def _gather_integers(communicator: CpuCommunicator, own: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate the tensors of all ranks, of equal shape."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(own) for _ in range(communicator.world_size)]
    dist.all_gather(parts, own.contiguous(), group=communicator.device_group)
    return torch.cat(parts, dim)


def _reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Add up tensors of all ranks; return the `sizes[rank]` rows of this one."""
    assert dim == 0, "as vLLM's other communicators"
    total = self.all_reduce(input_.contiguous())
    if sizes is None:
        sizes = [len(total) // self.world_size] * self.world_size
    own: torch.Tensor = total.split(list(sizes))[self.rank_in_group]
    return own.contiguous()
