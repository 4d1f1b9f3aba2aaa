"""The one place that knows whether there is a GPU. Import it before anything of Megatron: that
installs the CPU platform (`cpu_platform`) where CUDA is absent, and all of `upstream_fixes`."""

import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_megatron import pretended_cuda

pretended_cuda.install_if_wanted()  # before anything looks for a GPU
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Megatron decorates functions with torch.compile at import; on a CPU that needs a compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from grpo_megatron import gloo_device  # noqa: E402
from grpo_megatron.trainer.megatron import cpu_platform, upstream_fixes  # noqa: E402


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Let `import wandb` be an ImportError inside the block.

    Megatron-Core imports it where it is installed and goes on where it is not. Trainer ranks have
    no use for it, and its import makes temporary folders, which stay behind when a rank is
    killed."""
    hides = "wandb" not in sys.modules
    modules: dict[str, Any] = sys.modules  # a name whose module is None cannot be imported
    if hides:
        modules["wandb"] = None
    try:
        yield
    finally:
        if hides:
            del modules["wandb"]


def _hide_transformer_engine() -> None:
    """Let `import transformer_engine` be an ImportError from here on, in the environment for GPUs
    on a machine without one, or with one that only pretends.

    Megatron clips gradients and computes routers with it wherever it can be imported, of tensors
    on a CPU too (clip_grads.py:11, moe_utils.py:29 of 0.19.2)."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("transformer_engine", None)


def _as_it_is(model: Any = None, **settings: Any) -> Any:
    """Stand for `torch.compile`, called with a function or as a decorator with settings."""
    if model is None:
        return _as_it_is
    return model


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let `torch.compile` return functions as they are inside the block, where there is no GPU.

    With TORCHDYNAMO_DISABLE they run as they are too, but only after the compiler was imported,
    which is a fifth of what a rank computes until it is ready."""
    compile_with_torch = torch.compile
    if not HAS_CUDA:
        torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compile_with_torch


if not HAS_CUDA or pretended_cuda.is_wanted():
    _hide_transformer_engine()
with _without_wandb(), _without_compiler():
    upstream_fixes.installed_release()  # refuses others before anything of them is replaced
    cpu_platform.install()
    if pretended_cuda.is_wanted():  # it cannot run kernels either
        cpu_platform.stand_in_for_triton_kernels()
    # the modules that import it, of which others are imported later
    importlib.import_module("megatron.core.timers")
    importlib.import_module("megatron.core.inference.contexts.dynamic_context")
    importlib.import_module("megatron.core.inference.engines.dynamic_engine")
    upstream_fixes.install()
gloo_device.apply()

HAS_TRANSFORMER_ENGINE = HAS_CUDA and importlib.util.find_spec("transformer_engine") is not None
BACKEND = "nccl" if HAS_CUDA else "gloo"
"""Of torch.distributed."""


def device() -> torch.device:
    """Return where this rank computes: its GPU, or the CPU."""
    if HAS_CUDA:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def bind_device(local_rank: int, num_threads: int | None) -> None:
    """Claim this rank's GPU, or its share of the CPU's threads.

    Denormal numbers become zero from here on, in this thread and those that it starts: gradients
    hold many, and a CPU takes 50 times as long for each. A process that only imports this module
    keeps them."""
    torch.set_flush_denormal(True)
    if HAS_CUDA:
        torch.cuda.set_device(local_rank)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


def peak_memory_bytes() -> int:
    """Return the highest device memory (CUDA) or resident memory (CPU) of this process so far."""
    if HAS_CUDA:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
