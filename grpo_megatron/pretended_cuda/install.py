"""Put the pretended devices in place, in this process."""

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any

import torch
import torch.utils._device
from torch.utils._pytree import tree_map_only

from grpo_megatron.errors import SetupError
from grpo_megatron.pretended_cuda import (
    VARIABLE,
    build,
    collectives,
    cuda_module,
    shared_memory,
    tensor,
)
from grpo_megatron.pretended_cuda.current import NUM_DEVICES
from grpo_megatron.pretended_cuda.dispatch import PretendedCuda
from grpo_megatron.pretended_cuda.tensor import PretendedTensor

_left_open = contextlib.ExitStack()


@functools.cache
def install_once() -> None:
    """Install everything; a second call does nothing. See `pretended_cuda.install`."""
    if torch.cuda.is_available():
        raise SetupError(
            "there is a GPU: a pretended one would be in its way",
            remedy="set CUDA_VISIBLE_DEVICES= to pretend nevertheless",
        )
    if "megatron" in sys.modules:
        raise SetupError(
            "megatron was imported before the pretended CUDA device: it has looked for a GPU",
            remedy="call grpo_megatron.pretended_cuda.install first",
        )
    os.environ[VARIABLE] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # there is no GPU to compile for
    compiled: Any = torch
    compiled.compile = _as_it_is
    library = ctypes.CDLL(str(build.library()))
    if not library.pretend_devices(NUM_DEVICES):
        raise SetupError(
            f"torch {torch.__version__} does not see the pretended CUDA devices",
            remedy="pretended devices were tried with torch 2.13.0",
        )
    cuda_module.install(library.set_device)
    collectives.install()
    shared_memory.install()
    tensor.count_as_plain()
    _keep_parameters_through_conversions()
    _read_numbers_above_the_mode()
    mode: Any = PretendedCuda
    _left_open.enter_context(mode())
    print(
        f"*** PRETENDED CUDA ({VARIABLE}): no GPU computes here; tensors of cuda:N have their "
        "data on the CPU ***",
        file=sys.stderr,
        flush=True,
    )


def _as_it_is(model: Any = None, **settings: Any) -> Any:
    """Stand for `torch.compile`, called with a function or as a decorator with settings."""
    if model is None:
        return _as_it_is
    return model


def _keep_parameters_through_conversions() -> None:
    """`module.to("cuda")` keeps parameters and what was set on them.

    Where types differ torch exchanges what two tensors are, attributes included. Only then: what
    loads a state into a module has to copy, as it does for tensors of a GPU."""
    module: Any = torch.nn.Module
    convert = module._apply

    def keep_attributes(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        before = {}
        for name, parameter in self.named_parameters():
            before[name] = dict(parameter.__dict__)
        swapped_before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            convert(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapped_before)
        for name, parameter in self.named_parameters():
            attributes = before[name]
            attributes.pop("held", None)
            parameter.__dict__.update(attributes)
        return self

    module._apply = keep_attributes


def _read_numbers_above_the_mode() -> None:
    """`torch.tensor` copies data, and reads numbers of tensors, below every mode."""
    torch.utils._device._device_constructors()  # knows the original by identity
    torch._C._set_only_lift_cpu_tensors(True)
    make = torch.tensor

    @functools.wraps(make)
    def from_data(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, PretendedTensor):
            kwargs.setdefault("device", data.device)
            data = data.held
        else:
            data = tree_map_only(PretendedTensor, PretendedTensor.item, data)
        return make(data, *args, **kwargs)

    torch.tensor = from_data
