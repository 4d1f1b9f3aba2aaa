"""Every parameter of a model, where Megatron's checkpoints keep it, without making the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its stubs
from torch.overrides import TorchFunctionMode

from grpo_megatron.checkpoints.distributed import model_state
from grpo_megatron.checkpoints.torch_dist import ParameterTable, StoredRegion
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.reward_labels import labels_of
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.policy import add_reward_head, build_models, tensor_map
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, shutdown


class _OnMeta(TorchFunctionMode):
    """Megatron names a device wherever it allocates; `torch.device("meta")` does not reach it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if "device" in options:
            options["device"] = "meta"
        return function(*args, **options)


def parameter_table(hf: dict[str, Any]) -> ParameterTable:
    """Make the table from a config.json alone, of a reward model with its head. Joins a world of
    one for a moment.

    Raises ConfigError for a family or field that is not supported."""
    layout = TrainerConfig(precision="float32")
    initialize(layout, RankInfo(0, 0, 1), HashStore())
    config = transformer_config(hf, layout)
    config.perform_initialization = False
    num_scalars = len(labels_of(hf))
    with torch.device("meta"), _OnMeta():
        models = build_models(config, hf, layout, has_reward_head=num_scalars > 0)
    if num_scalars:
        for model in models:
            add_reward_head(model, num_scalars, seed=0)
    with torch.device("meta"), _OnMeta():
        state = model_state(models)["model"]
    shutdown()
    names = tensor_map(hf, config)
    parameters = []
    regions = {}
    objects = []
    for name, sharded in state.items():
        if isinstance(sharded, ShardedObject):
            objects.append(sharded.unique_key)
        else:
            parameters.append(names.parameter(name, tuple(sharded.data.shape)))
            regions[name] = tuple(_regions(sharded))
    return ParameterTable(tuple(parameters), regions, tuple(objects))


def _regions(sharded: Any) -> Iterator[StoredRegion]:
    """Yield where Megatron keeps the rows of a `ShardedTensor`, or of a factory of several."""
    parts: Any = [sharded]
    if isinstance(sharded, ShardedTensorFactory):
        parts = sharded.build()
    if isinstance(parts, dict):
        parts = parts.values()
    for part in parts:
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        yield StoredRegion(part.key, tuple(part.global_offset), sizes, tuple(part.global_shape))
