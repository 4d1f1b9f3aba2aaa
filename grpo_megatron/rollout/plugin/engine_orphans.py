"""The engine core ends when its API server is killed.

Defect (vLLM 0.32.0, v1/engine/core.py, `EngineCoreProc.run_engine_core`): nothing watches the
parent, so that after its `kill -9` the engine core stays, with the model's memory."""

import functools
import os
from typing import Any

from grpo_megatron.orphans import die_with_parent


def apply() -> None:
    """Ask the kernel, in every engine core, to end it with the process that started it."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.run_engine_core

    # The name must stay: a spawned engine core finds this function by its qualified name.
    @functools.wraps(original)
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        die_with_parent(os.getppid())
        original(*args, **kwargs)

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
