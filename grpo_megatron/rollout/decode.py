"""What `/inference/v1/generate` answers, decoded and checked: never silently wrong.

The JSON is decoded straight into typed records (fields that are not listed cost no object), then
into one array per column.
"""

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from grpo_megatron.errors import EngineError
from grpo_megatron.types import Completion, KeptSets, VersionSpan

Decoder = Callable[[Sequence[int]], str]
"""Token ids to text."""


class _TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _Candidates(_TokenLogprob, gc=False):
    top_logprobs: list[_TokenLogprob]


class _CandidateLogprobs(msgspec.Struct, gc=False):
    content: list[_Candidates]


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _TruncatedChoice(_Choice, gc=False):
    logprobs: _CandidateLogprobs | None = None


class _Response(msgspec.Struct, gc=False):
    choices: list[_Choice]


class _TruncatedResponse(msgspec.Struct, gc=False):
    choices: list[_TruncatedChoice]


_decoders = {False: msgspec.json.Decoder(_Response), True: msgspec.json.Decoder(_TruncatedResponse)}
_NO_PROBABILITY = -9999.0
"""vLLM puts this for NaN and for minus infinity, which JSON cannot carry."""
_MASS_TOLERANCE = 1e-4


def decode_response(
    body: bytes, *, where: str, num_prompt_tokens: int, num_completions: int, max_tokens: int,
    record_routes: bool, require_routes: bool = True, routes_from: int = 0,
    may_abort: bool = False, truncated: bool = False, decode: Decoder | None = None,
) -> list[Completion]:
    """The completions of one request, ordered by index.

    Args:
        body: JSON as received.
        where: Which engine answered, for errors.
        num_prompt_tokens: Length of the prompt.
        num_completions: How many were asked for.
        max_tokens: Longest completion asked for.
        record_routes: Whether routes were asked for.
        require_routes: Refuse routes that are missing or misshapen; else the completion has none.
        routes_from: The first row that was asked for.
        may_abort: Accept completions that the engine ended early, even before their first token.
        truncated: Whether candidates were asked for, of which sampling kept some.
        decode: Fills `Completion.text`; without it texts are empty.

    Raises:
        EngineError: Anything asked for is missing, of another size, or not finite.
    """
    try:
        choices = _decoders[truncated].decode(body).choices
    except msgspec.DecodeError as error:
        raise EngineError(f"unreadable answer: {error}: {body[:200]!r}", where=where) from error
    choices.sort(key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(num_completions)):
        raise EngineError(
            f"asked for {num_completions} completions, got {[c.index for c in choices]}",
            where=where,
        )
    completions = []
    for choice in choices:
        place = f"{where}, completion {choice.index}"
        completion = _completion(choice, place, max_tokens, may_abort, decode)
        if truncated:
            completion = replace(completion, kept=_kept(choice))
        if record_routes and len(completion.token_ids):
            try:
                completion = _with_routes(completion, choice, num_prompt_tokens, routes_from, place)
            except EngineError:
                if require_routes:
                    raise
        completions.append(completion)
    return completions


def _completion(
    choice: _Choice, where: str, max_tokens: int, may_abort: bool, decode: Decoder | None,
) -> Completion:
    num_tokens, aborted = len(choice.token_ids), may_abort and choice.finish_reason == "abort"
    if choice.finish_reason not in ("stop", "length") and not aborted:
        raise EngineError(f"completion ended with {choice.finish_reason!r}", where=where,
                          remedy="requests must not be in flight while weights are published")
    if not (0 if aborted else 1) <= num_tokens <= max_tokens:
        raise EngineError(f"{num_tokens} tokens where 1 to {max_tokens} were asked for",
                          where=where)
    return Completion(
        token_ids=np.array(choice.token_ids, np.int32),
        logprobs=_logprobs(choice, where),
        versions=_spans(choice.weight_versions, num_tokens, where),
        finish_reason=choice.finish_reason,
        text=decode(choice.token_ids) if decode is not None else "",
    )


def _with_routes(
    completion: Completion, choice: _Choice, num_prompt: int, first: int, where: str,
) -> Completion:
    """Row T_p - 1 + t sampled token t. What came before was computed by the first version: a
    request that is held computes it anew, but the engine then returns later rows only."""
    num_rows = num_prompt + len(completion.token_ids) - 1 - first
    routes = _routes(choice.routed_experts, num_rows, where)
    spans = tuple(VersionSpan(span.version, num_prompt - 1 + span.start if span.start else first,
                              num_prompt - 1 + span.end) for span in completion.versions)
    return replace(completion, routes=routes, route_versions=spans)


def _logprobs(choice: _Choice, where: str) -> np.ndarray:
    """`float32 [T]`."""
    content = choice.logprobs.content if choice.logprobs is not None else []
    values = np.array([entry.logprob for entry in content], np.float32)
    if len(values) != len(choice.token_ids):
        raise EngineError(f"{len(values)} log-probs for {len(choice.token_ids)} tokens",
                          where=where)
    # no sampled token has _NO_PROBABILITY
    if not (np.isfinite(values).all() and (values > _NO_PROBABILITY).all()
            and (values <= 0.0).all()):
        raise EngineError("log-probs are not finite and at most 0", where=where,
                          remedy="the policy's logits have overflowed; look at the weights")
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineError("log-probs belong to other tokens", where=where)
    return values


def _kept(choice: _TruncatedChoice) -> KeptSets:
    """Candidates with a probability. A set that lacks the sampled id, or others (its probabilities
    do not add up to 1), is left empty: nothing can be renormalised over it."""
    content = choice.logprobs.content if choice.logprobs is not None else []
    token = np.repeat(np.arange(len(content)), [len(entry.top_logprobs) for entry in content])
    ids = np.array([c.token_id for entry in content for c in entry.top_logprobs], np.int32)
    logprobs = np.array([c.logprob for entry in content for c in entry.top_logprobs])
    kept = logprobs > _NO_PROBABILITY
    token, ids, logprobs = token[kept], ids[kept], logprobs[kept]
    mass = np.bincount(token, np.exp(logprobs), len(content))
    sampled = np.array([entry.token_id for entry in content], np.int32)
    has_sampled = np.bincount(token, ids == sampled[token], len(content)) > 0
    good = has_sampled & (np.abs(mass - 1) < _MASS_TOLERANCE)
    token, ids = token[good[token]], ids[good[token]]
    sizes = np.bincount(token, minlength=len(content))
    return KeptSets(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def _spans(spans: list[_Span] | None, num_tokens: int, where: str) -> tuple[VersionSpan, ...]:
    covered, result = 0, []
    for span in spans or ():
        if span.start != covered or span.end <= span.start:
            break
        if not span.version.isdecimal():
            raise EngineError(f"weight version {span.version!r} is not a number", where=where)
        result.append(VersionSpan(int(span.version), span.start, span.end))
        covered = span.end
    if covered != num_tokens or len(result) != len(spans or ()):
        raise EngineError(f"weight-version spans {spans} do not cover {num_tokens} tokens",
                          where=where)
    return tuple(result)


def _routes(encoded: str | None, num_rows: int, where: str) -> np.ndarray:
    """`uint8/uint16 [T_p + T - 1, L, K]`."""
    if encoded is None:
        raise EngineError("expert routes were asked for and are missing", where=where,
                          remedy="start the engine with --enable-return-routed-experts")
    try:
        routes = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise EngineError(f"unreadable expert routes: {error}", where=where) from error
    if routes.ndim != 3 or routes.shape[0] != num_rows or routes.dtype not in (np.uint8, np.uint16):
        raise EngineError(
            f"expert routes are {routes.dtype} {routes.shape}, expected uint8 or uint16 "
            f"[{num_rows}, layers, experts per token]", where=where,
        )
    return routes
