"""A method that is called on all workers answers for all of them, with data-parallel engines too.

Defect (vLLM 0.32.0, v1/engine/core_client.py, `DPLBAsyncMPClient.call_utility_async`): every engine
executes the call, and the answers of all but the first are dropped. Which weights the others keep,
and whether these arrived, would not be known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine.core_client import DPLBAsyncMPClient


def apply() -> None:
    """Return the answers of every engine's workers, engine after engine."""
    from vllm.v1.engine import core_client

    core_client.DPLBAsyncMPClient.collective_rpc_async = _collective_rpc_async


async def _collective_rpc_async(
    self: DPLBAsyncMPClient,
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    of_engines = await self.call_utility_all_async("collective_rpc", method, timeout, args, kwargs)
    answers = []
    for of_engine in of_engines:
        answers += of_engine
    return answers
