"""The real policy of any rank of any world, on the meta device: what a worker process runs.

Megatron's groups are made on torch's fake backend, so that one process can be each rank in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import grpo_megatron.trainer.megatron.platform  # noqa: F401  # isort: skip
import torch
import torch.distributed as dist
from megatron.core import distributed as ddp
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.trainer.megatron import policy
from grpo_megatron.trainer.megatron.process_groups import (
    RankInfo,
    initialize,
    seed_everything,
    shutdown,
)

_CREATES = {"empty", "zeros", "ones", "tensor", "full"}


class _OnMeta(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs or getattr(function, "__name__", "") in _CREATES:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


@contextmanager
def _as_rank(layout: TrainerConfig, rank: int) -> Iterator[None]:
    """This process is `rank`, alone; everything is on the meta device."""
    new_group, init, type_ = dist.new_group, dist.init_process_group, torch.Tensor.type
    if dist.is_initialized():
        shutdown()

    def all_gather_object(found: list, value: Any, group=None) -> None:
        found[:] = [value] * len(found)

    def type_name(self, *args, **kwargs):
        found = type_(self, *args, **kwargs)
        return found.replace("torch.meta.", "torch.cuda.") if isinstance(found, str) else found

    replaced = {
        "new_group": lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"}),
        "all_gather_object": all_gather_object,
        "init_process_group": lambda backend, **kwargs: init("fake", **kwargs),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        stack.enter_context(mock.patch.object(torch.Tensor, "type", type_name))
        info = RankInfo(rank, 0, layout.num_ranks)
        initialize(layout, info, FakeStore())
        seed_everything(0)
        with torch.device("meta"), _OnMeta():
            yield
        shutdown()


def real_bytes(
    hf: dict[str, Any],
    trainer: dict[str, Any],
    rank: int,
    router_policy: str = "freeze_bias",
    overlaps: bool = False,
    value_head: bool = False,
) -> dict[str, Any]:
    """Bytes that `build_policy` allocates on `rank`, and the sizes of its parameters by chunk; with
    `value_head`, of a critic with the policy's layers."""
    layout, ddp_config = TrainerConfig(**trainer), ddp.DistributedDataParallelConfig

    def overlapping(**settings):
        return ddp_config(**{**settings, "overlap_grad_reduce": True})

    with ExitStack() as stack:
        stack.enter_context(_as_rank(layout, rank))
        if overlaps:
            stack.enter_context(
                mock.patch.object(ddp, "DistributedDataParallelConfig", overlapping)
            )
        if value_head:
            hf = {**hf, "tie_word_embeddings": False}
            stack.enter_context(mock.patch.object(policy, "build_models", _critics))
        return _bytes_of(policy.build_policy(hf, layout, OptimizerConfig(), router_policy))


_build_models = policy.build_models


def _critics(config: Any, hf: dict[str, Any], layout: TrainerConfig) -> list[torch.nn.Module]:
    """The policy's model chunks, with one number a token in the place of the output layer."""
    models = _build_models(config, hf, layout)
    for model in models:
        if model.post_process:
            model.output_layer = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )
    return models


def _bytes_of(built: policy.Policy) -> dict[str, Any]:
    buffers = [b for c in built.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    mapped = [b.param_data for b in buffers if b.param_data is not None]
    unmapped = [
        p for c in built.chunks for p in c.module.parameters() if not (mapped and p.requires_grad)
    ]
    for module in (m for c in built.chunks for m in c.module.modules()):
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # the first forward pass does
    optimizer = 0
    for part in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
        mains = [p for group in part.optimizer.param_groups for p in group["params"]]
        optimizer += sum(
            _size(p) for p in mains if p.dtype == torch.float32 and (built.config.bf16)
        )
        optimizer += 2 * sum(_size(torch.zeros_like(p)) for p in mains)
    return {
        "weights": sum(map(_size, [*mapped, *unmapped])),
        "gradients": sum(_size(b.grad_data) for b in buffers),
        "optimizer": optimizer,
        "buffers": sum(_size(b) for c in built.chunks for b in c.module.buffers()),
        "shapes": [[p.numel() for p in c.module.parameters()] for c in built.chunks],
    }


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
