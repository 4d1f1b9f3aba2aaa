"""Adapters in Megatron's distributed checkpoints: one tensor each, which loads at any layout."""

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from grpo_megatron.trainer.lora.adapter import Adapter
from grpo_megatron.weights.gather import Shard
from grpo_megatron.weights.parameters import ADAPTERS


def sharded_adapters(model: torch.nn.Module, prefix: str) -> dict[str, ShardedTensor]:
    """Describe every adapter's parameters, by their names in the model below `prefix`."""
    described = {}
    for path, module in model.named_modules():
        if not isinstance(module, Adapter):
            continue
        for attribute, shard in module.shards():
            described[f"{prefix}{path}.{attribute}"] = _described(module, shard)
    return described


def _described(adapter: Adapter, shard: Shard) -> ShardedTensor:
    offsets = []
    tensor_rank = adapter.split.group.rank()
    if shard.dim is not None:
        offsets.append((shard.dim, shard.rank, shard.size))
        tensor_rank = 0  # no other one has the same
    is_expert = adapter.split.is_expert and not adapter.shared
    if is_expert:
        data_rank = parallel_state.get_expert_data_parallel_rank()
    else:
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if shard.dim is None:
            tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return ShardedTensor.from_rank_offsets(
        ADAPTERS + shard.name, shard.tensor, *offsets, replica_id=(0, tensor_rank, data_rank)
    )
