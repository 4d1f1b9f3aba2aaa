"""Log-probs of a whole completion become JSON without several objects for each.

vLLM 0.32.0 makes a dict and three objects per sampled token (v1/engine/logprobs.py:88, scale_out/
token_in_token_out/serving.py:773) and walks them twice, in one process: 25 us a token."""


class _Entries(list):
    """What JSON says of each sampled token; -9999 is vLLM's for NaN and minus infinity."""


def apply() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.logprobs import LogprobsProcessor as Processor

    server = serving.ServingTokens
    answer = protocol.GenerateTokensResponse
    begin = Processor.from_new_request.__func__
    update = Processor._update_sample_logprobs
    create = server._create_tokens_logprobs
    dump = answer.model_dump

    def from_new_request(cls, tokenizer, request):
        processor = begin(cls, tokenizer, request)
        if (
            tokenizer is None
            and processor.num_logprobs == 0
            and (request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY)
        ):
            processor.logprobs = _Entries()
        return processor

    def _update_sample_logprobs(self, lists):
        if not isinstance(self.logprobs, _Entries):
            return update(self, lists)
        ids, values = (table[:, 0].tolist() for table in lists[:2])  # the sampled come first
        self.cumulative_logprob += sum(values)
        self.logprobs += [
            {"token_id": token, "logprob": value if value > -9999.0 else -9999.0}
            for token, value in zip(ids, values, strict=True)
        ]

    def _create_tokens_logprobs(self, token_ids, top_logprobs, *args, **options):
        if not isinstance(top_logprobs, _Entries):
            return create(self, token_ids, top_logprobs, *args, **options)
        return protocol.GenerateLogProbs.model_construct(content=top_logprobs)

    def model_dump(self, **options):
        return dump(self, **{"warnings": False, **options})  # of dicts where a model is declared

    Processor.from_new_request = classmethod(from_new_request)
    Processor._update_sample_logprobs = _update_sample_logprobs
    server._create_tokens_logprobs = _create_tokens_logprobs
    answer.model_dump = model_dump
