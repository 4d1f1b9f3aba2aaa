"""Log-probs of a whole completion become JSON without several objects for each.

vLLM 0.32.0 makes a dict and three objects per sampled token (v1/engine/logprobs.py:88, scale_out/
token_in_token_out/serving.py:773) and walks them twice, in one process: 25 us a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateLogProbs,
        GenerateTokensResponse,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

_LOWEST = -9999.0
"""What vLLM says in JSON for NaN and minus infinity."""


class _Entries(list[dict[str, Any]]):
    """What JSON says of each sampled token."""


def apply() -> None:
    """Let requests for the sampled tokens' log-probs alone collect them as JSON has them."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.logprobs import LogprobsProcessor as Processor

    server = serving.ServingTokens
    answer = protocol.GenerateTokensResponse
    begin = Processor.from_new_request.__func__
    update = Processor._update_sample_logprobs
    create = server._create_tokens_logprobs
    dump = answer.model_dump

    def from_new_request(
        cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        processor = begin(cls, tokenizer, request)
        if (
            tokenizer is None
            and processor.num_logprobs == 0
            and (request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY)
        ):
            processor.logprobs = _Entries()
        return processor

    def _update_sample_logprobs(self: LogprobsProcessor, lists: LogprobsLists) -> None:
        if not isinstance(self.logprobs, _Entries):
            update(self, lists)
            return
        token_ids, logprobs, *_ = lists  # of every token that was reported, the sampled first
        ids = token_ids[:, 0].tolist()
        values = logprobs[:, 0].tolist()
        self.cumulative_logprob += sum(values)
        for token, value in zip(ids, values, strict=True):
            if not value > _LOWEST:  # true of NaN as well
                value = _LOWEST
            self.logprobs.append({"token_id": token, "logprob": value})

    def _create_tokens_logprobs(
        self: ServingTokens,
        token_ids: Sequence[int],
        top_logprobs: _Entries | Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> GenerateLogProbs:
        if not isinstance(top_logprobs, _Entries):
            return create(self, token_ids, top_logprobs, *args, **options)
        return protocol.GenerateLogProbs.model_construct(content=top_logprobs)

    def model_dump(self: GenerateTokensResponse, **options: Any) -> dict[str, Any]:
        options.setdefault("warnings", False)  # of dicts where a model is declared
        dumped: dict[str, Any] = dump(self, **options)
        return dumped

    Processor.from_new_request = classmethod(from_new_request)
    Processor._update_sample_logprobs = _update_sample_logprobs
    server._create_tokens_logprobs = _create_tokens_logprobs
    answer.model_dump = model_dump
