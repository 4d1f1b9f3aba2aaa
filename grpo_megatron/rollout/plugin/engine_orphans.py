"""The engine core ends when its API server is killed.

Defect (vLLM 0.32.0, v1/engine/core.py, `EngineCoreProc.run_engine_core`): nothing watches the
parent, so that after its `kill -9` the engine core stays, with the model's memory."""

import functools
import os

from grpo_megatron.orphans import die_with_parent


def apply() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.run_engine_core

    # The name must stay: a spawned engine core finds this function by its qualified name.
    @functools.wraps(original)
    def run_engine_core(*args, **kwargs):
        die_with_parent(os.getppid())
        return original(*args, **kwargs)

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
