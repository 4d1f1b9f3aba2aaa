"""Every parameter of a model, where Megatron's checkpoints keep it, without making the model."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch.distributed import HashStore
from torch.overrides import TorchFunctionMode

from grpo_megatron.checkpoints.distributed import model_state
from grpo_megatron.checkpoints.torch_dist import ParameterTable, Piece
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.policy import build_models, tensor_map
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, shutdown


class _OnMeta(TorchFunctionMode):
    """Megatron names a device wherever it allocates; `torch.device("meta")` does not reach it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def parameter_table(hf: dict[str, Any]) -> ParameterTable:
    """From a config.json alone. Joins a world of one for a moment.

    Raises ConfigError: a family or field that is not supported."""
    layout = TrainerConfig(precision="float32")
    initialize(layout, RankInfo(0, 0, 1), HashStore())
    config = transformer_config(hf, layout)
    config.perform_initialization = False
    with torch.device("meta"), _OnMeta():
        state = model_state(build_models(config, hf, layout))["model"]
    shutdown()
    objects = tuple(s.unique_key for s in state.values() if isinstance(s, ShardedObject))
    weights = {name: s for name, s in state.items() if not isinstance(s, ShardedObject)}
    names = tensor_map(hf, config)
    parameters = tuple(names.parameter(name, tuple(s.data.shape)) for name, s in weights.items())
    return ParameterTable(parameters, {n: tuple(_pieces(s)) for n, s in weights.items()}, objects)


def _pieces(sharded: Any) -> Iterator[Piece]:
    built = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for part in built.values() if isinstance(built, dict) else built:
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        yield Piece(part.key, tuple(part.global_offset), sizes, tuple(part.global_shape))
