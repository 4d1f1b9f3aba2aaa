"""The weights that this rank holds, under the names that they have in the whole model."""

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from grpo_megatron.weights.gather import Shard

_LOCAL_EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc\d\.(?:weight|bias))(\d+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def local_shards(chunks: Sequence[torch.nn.Module], num_experts: int) -> Iterator[Shard]:
    """Every parameter and selection bias of this rank's chunks; layers and experts made global."""
    experts = parallel_state.get_expert_model_parallel_group()
    first_expert = num_experts // experts.size() * experts.rank()
    for model in unwrap_model(list(chunks)):
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in _weights(model):
            name = _LAYER.sub(lambda m, n=numbers: f"decoder.layers.{n[int(m[1])]}.", name)
            name = _LOCAL_EXPERT.sub(lambda m: m[1] + str(int(m[2]) + first_expert), name)
            yield _shard(name, parameter)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            # Float16Module has rounded it; the router makes it fp32 again only when it is used
            buffer.data = buffer.data.float()
            yield name, buffer


def _shard(name: str, parameter: torch.Tensor) -> Shard:
    group = (parallel_state.get_expert_tensor_parallel_group() if ".experts." in name
             else parallel_state.get_tensor_model_parallel_group())
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Shard(name, parameter)
    dim = 1 if "linear_fc2" in name else parameter.partition_dim
    return Shard(name, parameter, dim, group.size(), group.rank(), group)
