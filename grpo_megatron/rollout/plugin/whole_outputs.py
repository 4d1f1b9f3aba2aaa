"""The engine core sends a completion whole where its client wants nothing before the end.

vLLM 0.32.0 (v1/engine/core.py:1603) sends every token to the API server, also for a client that
asked for the final answer only: two process switches and a loop over all requests per step. Here
it collects until a request ends, a weight version is set, or requests are aborted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request

    Held = dict[str, tuple[int, list[EngineCoreOutput]]]
    """By request: its client, and its outputs so far."""
    StepResult = tuple[dict[int, EngineCoreOutputs], bool]
    """Messages by client, and whether the model was executed."""


def apply() -> None:
    """Let the engine core hold the outputs of requests whose client wants them at the end."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCoreProc, name, _holding(getattr(EngineCoreProc, name)))
    for name in ("set_weight_version", "_send_abort_outputs"):
        setattr(EngineCoreProc, name, _releasing(getattr(EngineCoreProc, name)))
    EngineCoreProc.abort_requests = _forgetting(EngineCore.abort_requests)


def _holding(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Wrap a step of the engine core: what may be held is not sent."""

    @functools.wraps(step)
    def holding(self: EngineCoreProc) -> StepResult:
        outputs, executed = step(self)
        sent = {}
        for client, message in (outputs or {}).items():
            came = message.outputs
            message.outputs = []
            for output in came:
                whole = _whole_or_none(self, output)
                if whole is not None:
                    message.outputs.append(whole)
            if message.outputs or message.scheduler_stats or message.finished_requests:
                sent[client] = message
        return sent, executed

    return holding


def _whole_or_none(core: EngineCoreProc, output: EngineCoreOutput) -> EngineCoreOutput | None:
    """Return all that was held of a request at its end; None for a part that is held."""
    held = _held(core)
    if output.finish_reason is not None:
        _, parts = held.pop(output.request_id, (0, []))
        if not parts:
            return output
        return _joined([*parts, output])
    if output.request_id in held:
        _, parts = held[output.request_id]
        parts.append(output)
        return None
    request = core.scheduler.requests.get(output.request_id)
    if request is None or not _wants_end_only(request) or output.new_sampling_mask is not None:
        return output
    held[output.request_id] = (request.client_index, [output])
    return None


def _wants_end_only(request: Request) -> bool:
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop  # the API server looks for these, and ends the request
        and not request.resumable
    )


def _joined(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Join all outputs of a request in the last one, whose remaining fields are a whole's."""
    first = parts[0]
    whole = parts[-1]
    token_ids: list[int] = []
    tables = []
    routes = []
    events: list[Any] = []
    for part in parts:
        token_ids += part.new_token_ids
        if part.new_logprobs is not None:
            tables.append(part.new_logprobs)
        if part.routed_experts is not None:
            routes.append(part.routed_experts)
        events += part.events or ()
    whole.new_token_ids = token_ids
    if first.new_logprobs is not None:
        whole.new_logprobs = _joined_logprobs(tables)
    whole.routed_experts = None
    if routes:
        whole.routed_experts = np.concatenate(routes)
    whole.events = events or None
    for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"):
        setattr(whole, name, getattr(first, name))  # of the prompt
    return whole


def _joined_logprobs(tables: list[LogprobsLists]) -> LogprobsLists:
    """Join the log-probs of consecutive steps, [tokens, columns] each.

    A step has as many columns as the request in it that wants most log-probs: the fewest stay."""
    width = min(table.logprobs.shape[1] for table in tables)
    ids = []
    logprobs = []
    ranks = []
    for table in tables:
        ids.append(table.logprob_token_ids[:, :width])
        logprobs.append(table.logprobs[:, :width])
        ranks.append(table.sampled_token_ranks)
    columns = [np.concatenate(column) for column in (ids, logprobs, ranks)]
    return tables[0]._make([*columns, None])


def _releasing(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of the engine core: everything held is sent first."""

    @functools.wraps(method)
    def releasing(self: EngineCoreProc, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        held = _held(self)
        for client, parts in held.values():
            message = EngineCoreOutputs(
                outputs=[_joined(parts)], weight_version=self._weight_version
            )
            self.output_queue.put_nowait((client, message))
        held.clear()
        method(self, *args, **kwargs)

    return releasing


def _forgetting(abort_requests: Callable[..., None]) -> Callable[..., None]:
    """Wrap the method that aborts requests: what is held of them is dropped."""

    @functools.wraps(abort_requests)
    def forgetting(self: EngineCoreProc, request_ids: list[str]) -> None:
        for request_id in request_ids:
            _held(self).pop(request_id, None)
        abort_requests(self, request_ids)

    return forgetting


def _held(core: EngineCoreProc) -> Held:
    held: Held = core.__dict__.setdefault("_grpo_megatron_held", {})
    return held
