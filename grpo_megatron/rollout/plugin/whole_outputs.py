"""The engine core sends a completion whole where its client wants nothing before the end.

vLLM 0.32.0 (v1/engine/core.py:1603) sends every token to the API server, also for a client that
asked for the final answer only: two process switches and a loop over all requests per step. Here
it collects until a request ends, a weight version is set, or requests are aborted."""

import functools

import numpy as np


def apply() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCoreProc, name, _holding(getattr(EngineCoreProc, name)))
    for name in ("set_weight_version", "_send_abort_outputs"):
        setattr(EngineCoreProc, name, _releasing(getattr(EngineCoreProc, name)))
    EngineCoreProc.abort_requests = _forgetting(EngineCore.abort_requests)


def _holding(step):
    @functools.wraps(step)
    def holding(self):
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


def _whole_or_none(core, output):
    """Of the end of a request all that was held of it; None of a part that is held."""
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


def _wants_end_only(request) -> bool:
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop  # the API server looks for these, and ends the request
        and not request.resumable
    )


def _joined(parts: list):
    """One output with the tokens of all; the others' remaining fields are those of a whole."""
    first = parts[0]
    whole = parts[-1]
    whole.new_token_ids = [token for part in parts for token in part.new_token_ids]
    if first.new_logprobs is not None:
        tables = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        # a step has as many columns as the request in it that wants most log-probs
        width = min(table.logprobs.shape[1] for table in tables)
        ids = np.concatenate([table.logprob_token_ids[:, :width] for table in tables])
        logprobs = np.concatenate([table.logprobs[:, :width] for table in tables])
        ranks = np.concatenate([table.sampled_token_ranks for table in tables])
        whole.new_logprobs = first.new_logprobs._make([ids, logprobs, ranks, None])
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    whole.routed_experts = None
    if routes:
        whole.routed_experts = np.concatenate(routes)
    whole.events = [event for part in parts for event in part.events or ()] or None
    for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"):
        setattr(whole, name, getattr(first, name))  # of the prompt
    return whole


def _releasing(method):
    @functools.wraps(method)
    def releasing(self, *args, **kwargs):
        from vllm.v1.engine import EngineCoreOutputs

        held = _held(self)
        for client, parts in held.values():
            message = EngineCoreOutputs(
                outputs=[_joined(parts)], weight_version=self._weight_version
            )
            self.output_queue.put_nowait((client, message))
        held.clear()
        return method(self, *args, **kwargs)

    return releasing


def _forgetting(abort_requests):
    @functools.wraps(abort_requests)
    def forgetting(self, request_ids):
        for request_id in request_ids:
            _held(self).pop(request_id, None)
        return abort_requests(self, request_ids)

    return forgetting


def _held(core) -> dict[str, tuple[int, list]]:
    """By request: its client, and its outputs so far."""
    return core.__dict__.setdefault("_grpo_megatron_held", {})
