"""The answer to a request for several completions tells the cached tokens of all of them.

Defect (vLLM 0.32.0, v1/engine/output_processor.py, `RequestState._new_request_output`): each
completion is a request of its own to the engine, and the answer has the cached tokens of the one
that ended last."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.engine.parallel_sampling import ParentRequest


def apply() -> None:
    """Add up the cached tokens of the completions of a request, as they end."""
    from vllm.v1.engine.output_processor import RequestState as State

    make = State.make_request_output

    @functools.wraps(make)
    def make_request_output(
        self: RequestState, *args: Any, **options: Any
    ) -> RequestOutput | PoolingRequestOutput | None:
        parent = self.parent_req
        if parent is not None:
            _cached_of_children(parent)[self.request_id] = self.num_cached_tokens
        output = make(self, *args, **options)
        if parent is not None and output is not None:
            output.num_cached_tokens = _cached_of_children(parent).total()
        return output

    State.make_request_output = make_request_output


def _cached_of_children(parent: ParentRequest) -> Counter[str]:
    """Cached tokens by child."""
    counts: Counter[str] = parent.__dict__.setdefault("_grpo_megatron_cached", Counter())
    return counts
