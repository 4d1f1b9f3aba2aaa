"""Every parameter of a model, where Megatron's checkpoints keep it, without making the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch.distributed import HashStore
from torch.overrides import TorchFunctionMode

from grpo_megatron.checkpoints.distributed import model_state
from grpo_megatron.checkpoints.torch_dist import Piece
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer.distributed import RankInfo, initialize, shutdown
from grpo_megatron.trainer.model_config import transformer_config
from grpo_megatron.trainer.policy import attention_shape, build_models
from grpo_megatron.weights.layout import AttentionShape, split
from grpo_megatron.weights.rules import resolve, rules_for
from grpo_megatron.weights.transfer_plan import TensorEntry

CARRIED = "carried."
"""Begins the keys of tensors that Megatron's own loading passes over."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of the whole model."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the Hugging Face tensors that it is made of."""

    def entries(self, dtype: torch.dtype) -> list[TensorEntry]:
        text = str(dtype).removeprefix("torch.")
        return [TensorEntry(name, text, shape) for name, shape in self.hf]


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """What a checkpoint of this model consists of, in checkpoint order."""

    parameters: tuple[Parameter, ...]
    objects: tuple[str, ...]
    """Keys of extra states, which hold nothing."""
    shape: AttentionShape
    vocab_size: int

    @property
    def num_elements(self) -> int:
        return sum(torch.Size(parameter.shape).numel() for parameter in self.parameters)


    def with_carried(self, tensors: Mapping[str, tuple[int, ...]]) -> ParameterTable:
        """Also Hugging Face tensors that Megatron has no parameter for, kept under `CARRIED`."""
        more = [Parameter(CARRIED + name, "copy", shape,
                          (Piece(CARRIED + name, (0,) * len(shape), shape, shape),),
                          ((name, shape),)) for name, shape in sorted(tensors.items())]
        return replace(self, parameters=(*self.parameters, *more))


class _OnMeta(TorchFunctionMode):
    """Megatron names a device wherever it allocates; `torch.device("meta")` does not reach it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def parameter_table(hf: dict[str, Any]) -> ParameterTable:
    """From a config.json alone. Joins a world of one for a moment.

    Raises:
        ConfigError: a family or field that is not supported.
    """
    layout = TrainerConfig(precision="float32")
    rules = rules_for(hf["model_type"])
    initialize(layout, RankInfo(0, 0, 1), HashStore())
    config = transformer_config(hf, layout)
    config.perform_initialization = False
    with torch.device("meta"), _OnMeta():
        state = model_state(build_models(config, hf, layout))["model"]
    shape, parameters, objects = attention_shape(config), [], []
    for name, sharded in state.items():
        if isinstance(sharded, ShardedObject):
            objects.append(sharded.unique_key)
            continue
        full = tuple(sharded.data.shape)
        kind, names = resolve(rules, name)
        parts = split(kind, torch.empty(full, device="meta"), shape, hf["vocab_size"])
        hf_shapes = [(n, tuple(t.shape)) for n, t in zip(names, parts, strict=True)]
        parameters.append(Parameter(name, kind, full, tuple(_pieces(sharded)), tuple(hf_shapes)))
    shutdown()
    return ParameterTable(tuple(parameters), tuple(objects), shape, hf["vocab_size"])


def _pieces(sharded: Any) -> Iterator[Piece]:
    parts: Sequence = (sharded,)
    if isinstance(sharded, ShardedTensorFactory):
        built = sharded.build()
        parts = list(built.values()) if isinstance(built, dict) else built
    for part in parts:
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        yield Piece(part.key, tuple(part.global_offset), sizes, tuple(part.global_shape))
