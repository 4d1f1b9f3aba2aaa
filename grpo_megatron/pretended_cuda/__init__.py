"""A CUDA device that only pretends: tensors say `cuda:0`, their data are on the CPU.

The trainer's CUDA branch runs on it, on a machine without a GPU. What a GPU would refuse is refused
(host and device tensors in one operation, numpy of a device tensor, a host tensor given to NCCL),
and what would make the host wait for a GPU is recorded with file and line.

    GRPO_MEGATRON_PRETENDED_CUDA=1 grpo-megatron ...        every trainer rank of it
    python -m grpo_megatron.pretended_cuda -m MODULE ...     one process
    from grpo_megatron import pretended_cuda; pretended_cuda.install()    this process

Nothing here is fast, and nothing says that a kernel of CUDA computes the right thing: see
docs/pretended-device.md. This module does not import torch; `install` does."""

import os
from collections.abc import Mapping

VARIABLE = "GRPO_MEGATRON_PRETENDED_CUDA"
"""Of the environment. Processes that the trainer starts inherit it."""


def is_wanted() -> bool:
    """Say whether the environment asks for the pretended device."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def environment() -> Mapping[str, str]:
    """Return the variables with which a child process, if it trains, pretends to have a GPU."""
    return {VARIABLE: "1"}


def install_if_wanted() -> bool:
    """Install the device where the environment asks for it; say whether it is there.

    Raises SetupError where its C++ part cannot be compiled."""
    if is_wanted():
        install()
    return is_wanted()


def install() -> None:
    """Let this process have pretended CUDA devices, once and for good.

    Call before Megatron is imported: many of its modules look for a GPU then. Children that train
    do the same. Raises SetupError where the C++ part cannot be compiled, or there is a real GPU."""
    from grpo_megatron.pretended_cuda.install import install_once

    install_once()
