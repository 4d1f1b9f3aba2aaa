"""CPU, one worker: fork the engine core from the API server in place of spawning it.

vLLM forces `spawn` on a CPU (0.32.0, platforms/cpu.py:451) because its workers bind OpenMP threads
before torch is loaded. An engine whose worker runs inside the engine core binds nothing, and a
forked engine core does not import torch and vLLM again (`engine.toml` has what that saves)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform


def apply() -> None:
    """Fork engine cores of this process, which must not have started OpenMP threads by then."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
