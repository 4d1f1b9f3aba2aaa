"""CPU, one worker: fork the engine core from the API server in place of spawning it.

vLLM forces `spawn` on a CPU (0.32.0, platforms/cpu.py:451) because its workers bind OpenMP threads
before torch is loaded. An engine whose worker runs inside the engine core binds nothing, and a
forked engine core does not import torch and vLLM again (`engine.toml` has what that saves)."""

import os


def apply() -> None:
    """For this process only; it must not have started OpenMP threads when the engine starts."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
