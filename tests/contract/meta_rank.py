"""Models of any rank on the meta device, of Transformer Engine's layers too.

`grpo_megatron.trace` takes torch's layers only: it names the meta device by an object, which
Transformer Engine does not know as one without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import grpo_megatron.trainer.megatron.platform  # noqa: F401  # isort: skip
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_megatron.config.trainer import TrainerConfig
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
def as_rank(layout: TrainerConfig, rank: int) -> Iterator[None]:
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
