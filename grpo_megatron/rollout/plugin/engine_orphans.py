"""The engine core ends when its API server is killed.

Defect (vLLM 0.32.0, v1/engine/core.py, `EngineCoreProc.run_engine_core`): nothing watches the
parent, so after `kill -9` of the API server the engine core stays, with the model's memory.
(Workers of a tensor-parallel engine watch the engine core by a pipe.) Linux can signal a child.
"""

import ctypes
import functools
import os
import signal

_PR_SET_PDEATHSIG = 1


def apply() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.run_engine_core

    # The name must stay: a spawned engine core finds this function by its qualified name.
    @functools.wraps(original)
    def run_engine_core(*args, **kwargs):
        _die_with_parent()
        return original(*args, **kwargs)

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def _die_with_parent() -> None:
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # not Linux
        return
    parent = os.getppid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
