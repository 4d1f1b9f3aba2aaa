"""vLLM's CUDA build on a machine without a GPU: it is told of eight H100s.

Its configuration, parsers, routes and classes are then those of a GPU machine. Nothing computes.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

GPUS_PER_NODE = 8
_HOPPER = (9, 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 << 30,
    multi_processor_count=132,
    major=_HOPPER[0],
    minor=_HOPPER[1],
)


def pretend() -> None:
    """Before any other module of vLLM is imported: many ask for the platform at import."""
    import torch

    torch.cuda.get_device_capability = lambda *_, **__: _HOPPER
    torch.cuda.get_device_properties = lambda *_, **__: _PROPERTIES
    torch.cuda.get_device_name = lambda *_, **__: _PROPERTIES.name
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    NonNvmlCudaPlatform.device_count = classmethod(lambda _: GPUS_PER_NODE)
    vllm.platforms._current_platform = NonNvmlCudaPlatform()


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns: a configuration of vLLM leaves traces in the process that made it.

    Raises AssertionError with the traceback of whatever it raised."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_result, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        failure, result = ours.recv()
    except EOFError:
        raise AssertionError("the process ended without a result") from None
    finally:
        process.join()
    assert not failure, failure
    return result


def _send_result(
    connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        connection.send(("", function(*arguments)))
    except BaseException:  # a parser that refuses an argument exits
        connection.send((traceback.format_exc(), None))
