"""Every collective of a rank: what it moves, within which group, and who asked for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._pytree import tree_flatten, tree_map_only

_KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One call, as this rank makes it."""

    phase: str
    kind: str
    group: str
    """Which of Megatron's groups: tp, cp, ep, etp, ep_etp, dp, edp, pp, embd, mp, world."""
    size: int
    """Ranks in the group."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Of the larger side: the result of an all-gather, the input of a reduce-scatter; of an
    all-to-all the input; else of the tensor."""
    line: str
    module: str


class GroupNames:
    """Megatron's groups by what they are for."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        found = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
            "etp": parallel_state.get_expert_tensor_parallel_group(),
            "ep_etp": parallel_state.get_expert_tensor_and_model_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "edp": parallel_state.get_expert_data_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "optimizer": parallel_state.get_intra_distributed_optimizer_instance_group(),
            "tp_dp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            "mp": parallel_state.get_model_parallel_group(),
            "expert_mp": parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            "embd": parallel_state.get_embedding_group(check_initialized=False),
            "world": dist.group.WORLD,
        }
        for name, group in found.items():
            if isinstance(group, dist.ProcessGroup):
                self._names.setdefault(group.group_name, name)

    def name(self, group: dist.ProcessGroup) -> str:
        """Return what a group is for, or what torch calls it."""
        return self._names.get(group.group_name, group.group_name)


def call(operation: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Let the fake backend answer with small tensors in place of those without memory."""
    small = []
    for argument in args:
        are_split_sizes = isinstance(argument, list) and argument and type(argument[0]) is int
        small.append([] if are_split_sizes else argument)
    stand_in = torch.empty(0, device="cpu")
    small_args, small_kwargs = tree_map_only(torch.Tensor, lambda tensor: stand_in, (small, kwargs))
    found = operation(*small_args, **small_kwargs)
    if isinstance(found, tuple):  # tensors, and the work
        return (args[0], *found[1:])
    return found


def described(
    operation: Any, args: Sequence[Any], groups: GroupNames, phase: str, line: str, module: str
) -> Collective | None:
    """Return the record of one call; None for what moves no tensor, a barrier."""
    kind = _KINDS[operation._schema.name.partition("::")[2]]
    sides = []
    group: dist.ProcessGroup | None = None
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            if group is None:
                group = dist.ProcessGroup.unbox(argument)
            continue
        tensors = [leaf for leaf in tree_flatten(argument)[0] if isinstance(leaf, torch.Tensor)]
        if tensors:
            sides.append(tensors)
    if kind == "barrier" or group is None:
        return None
    largest = max(sides, key=_bytes_of)
    name = groups.name(group)
    if kind == "all-to-all":
        largest = sides[1]  # what is given; what comes depends on others
    if kind in ("send", "receive"):
        name = "pp"  # Megatron takes the world's group too, to have two directions at once
    first = largest[0]
    shape = tuple(first.shape)
    if len(largest) > 1:
        shape = (len(largest), *shape)
    return Collective(
        phase=phase,
        kind=kind,
        group=name,
        size=group.size(),
        dtype=str(first.dtype).removeprefix("torch."),
        shape=shape,
        bytes=_bytes_of(largest),
        line=line,
        module=module,
    )


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fill_known(operation: Any, args: Sequence[Any], boundary: Sequence[int]) -> None:
    """Give known numbers to a tensor that other ranks would have filled.

    A received shape is `boundary`, that of what goes from one pipeline stage to the next. Of
    all-gathered counts every rank has the same."""
    name = operation._schema.name.partition("::")[2]
    if name == "recv_":
        [tensor] = args[0]
        if not tensor.is_meta and tensor.numel() == len(boundary):
            tensor.copy_(torch.tensor(boundary, device="cpu"))
    elif name == "_allgather_base_":
        output, given = args[:2]
        if not output.is_meta and not given.is_meta:
            output.view(-1, *given.shape).copy_(
                given.expand(output.numel() // given.numel(), *given.shape)
            )
