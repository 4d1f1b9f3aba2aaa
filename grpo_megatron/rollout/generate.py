"""`/inference/v1/generate`: what is asked, and the answer, decoded and checked.

JSON becomes typed records (fields not listed cost no object), then one array per column."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from grpo_megatron.errors import EngineError, raised_as
from grpo_megatron.rollout.engine_images import EngineImage, features_of
from grpo_megatron.types import Completion, SamplingMask, VersionSpan

_NO_PROBABILITY = -9999.0  # vLLM's for NaN and for minus infinity, which JSON cannot carry
_MASS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """What an engine answers to a `GenerateRequest`."""

    completions: list[Completion]
    cached_tokens: int | None
    """Tokens of the prompt whose keys and values the engine had, over all `n` completions; None: it
    does not say."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Completions of one prompt, and how they are sampled."""

    prompt_token_ids: Sequence[int]
    max_tokens: int  # longest completion, the stop token included
    n: int = 1  # with a seed, child i uses seed + i
    temperature: float = 1.0  # 0 is greedy; log-probs are then those of temperature 1
    stop_token_ids: Sequence[int] = ()  # a completion ends after any of these, and of no other
    seed: int | None = None
    record_routes: bool = False  # the experts of every token
    require_routes: bool = True  # refuse missing or misshapen ones; else a completion has none
    routes_from: int = 0  # first row of `Completion.routes`; rows before are not sent
    may_abort: bool = False  # accept what a pause ended early ("abort", maybe no tokens)
    is_continuation: bool = False  # of a sample that was asked for before; only counted
    truncation: Mapping[str, float] = field(default_factory=dict)
    """See `RolloutConfig.truncation`; completions then tell which ids were kept."""
    images: Sequence[EngineImage] = ()
    """Those of the prompt, whose ids have all tokens of each."""

    def body(self) -> dict[str, Any]:
        """Return the JSON object that is sent."""
        sampling: dict[str, Any] = {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(self.stop_token_ids),
            # else generation_config.json of the checkpoint ends them as well
            "ignore_eos": True,
            **self.truncation,
        }
        if self.seed is not None:
            sampling["seed"] = self.seed
        if self.routes_from:
            sampling["routed_experts_prompt_start"] = self.routes_from
        body: dict[str, Any] = {
            "token_ids": list(self.prompt_token_ids),
            "sampling_params": sampling,
        }
        if self.images:
            body["features"] = features_of(self.images)
        return body

    def decode(self, body: bytes, where: str) -> GenerateAnswer:
        """Return the completions, ordered by index and without text. where: the engine.

        Raises EngineError when anything asked for is missing, of another size, or not finite."""
        try:
            response = _decoders[bool(self.truncation)].decode(body)
        except msgspec.DecodeError as error:
            raise EngineError(f"unreadable answer: {error}: {body[:200]!r}", where=where) from error
        choices = response.choices
        choices.sort(key=lambda choice: choice.index)
        found = [choice.index for choice in choices]
        if found != list(range(self.n)):
            raise EngineError(f"asked for {self.n} completions, got {found}", where=where)
        completions = []
        for choice in choices:
            try:
                completions.append(_completion(self, choice))
            except EngineError as error:
                error.where = f"{where}, completion {choice.index}"
                raise
        return GenerateAnswer(completions, _cached_tokens(response.usage))


_Entry = TypeVar("_Entry")


class _TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Candidates(_TokenLogprob, gc=False):
    top_logprobs: list[_TokenLogprob]


class _Logprobs(msgspec.Struct, Generic[_Entry], gc=False):
    content: list[_Entry]


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, Generic[_Entry], gc=False):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs[_Entry] | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _PromptTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _PromptTokens | None = None


class _Response(msgspec.Struct, Generic[_Entry], gc=False):
    choices: list[_Choice[_Entry]]
    usage: _Usage | None = None


_decoders: dict[bool, msgspec.json.Decoder[Any]] = {
    False: msgspec.json.Decoder(_Response[_TokenLogprob]),
    True: msgspec.json.Decoder(_Response[_Candidates]),
}
"""By whether sampling is truncated, so that the kept ids are among the log-probs."""


def _cached_tokens(usage: _Usage | None) -> int | None:
    if usage is None or usage.prompt_tokens_details is None:
        return None
    return usage.prompt_tokens_details.cached_tokens


def _completion(request: GenerateRequest, choice: _Choice) -> Completion:
    num_tokens = len(choice.token_ids)
    aborted = request.may_abort and choice.finish_reason == "abort"
    if choice.finish_reason not in ("stop", "length") and not aborted:
        raise EngineError(
            f"completion ended with {choice.finish_reason!r}",
            remedy="requests must not be in flight while weights are published",
        )
    least = 1
    if aborted:
        least = 0
    if not least <= num_tokens <= request.max_tokens:
        raise EngineError(f"{num_tokens} tokens where 1 to {request.max_tokens} were asked for")
    kept = None
    if request.truncation:
        kept = _kept(choice)
    completion = Completion(
        np.array(choice.token_ids, np.int32),
        _logprobs(choice),
        _spans(choice.weight_versions or [], num_tokens),
        str(choice.finish_reason),
        text="",
        kept=kept,
    )
    if request.record_routes and num_tokens:
        try:
            return _with_routes(completion, request, choice.routed_experts)
        except EngineError:
            if request.require_routes:
                raise
    return completion


def _content(choice: _Choice[_Entry]) -> list[_Entry]:
    if choice.logprobs is None:
        return []
    return choice.logprobs.content


def _logprobs(choice: _Choice) -> np.ndarray:
    """`float32 [T]`."""
    content = _content(choice)
    values = np.array([entry.logprob for entry in content], np.float32)
    if len(values) != len(choice.token_ids):
        raise EngineError(f"{len(values)} log-probs for {len(choice.token_ids)} tokens")
    # no sampled token has _NO_PROBABILITY, and NaN fails both
    if not ((values > _NO_PROBABILITY) & (values <= 0.0)).all():
        raise EngineError(
            "log-probs are not finite and at most 0",
            remedy="the policy's logits have overflowed; look at the weights",
        )
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineError("log-probs belong to other tokens")
    return values


def _kept(choice: _Choice[_Candidates]) -> SamplingMask:
    """Return the candidates with a probability. A set that lacks the sampled id, or other ids (its
    probabilities do not add up to 1), is left empty: nothing can be renormalised over it."""
    content = _content(choice)
    candidates: list[_TokenLogprob] = []
    num_candidates = []
    for entry in content:
        candidates += entry.top_logprobs
        num_candidates.append(len(entry.top_logprobs))
    token = np.repeat(np.arange(len(content)), num_candidates)
    ids = np.array([candidate.token_id for candidate in candidates], np.int32)
    logprobs = np.array([candidate.logprob for candidate in candidates])
    kept = logprobs > _NO_PROBABILITY
    token = token[kept]
    ids = ids[kept]
    logprobs = logprobs[kept]
    mass = np.bincount(token, np.exp(logprobs), len(content))
    sampled = np.array([entry.token_id for entry in content], np.int32)
    has_sampled = np.bincount(token, ids == sampled[token], len(content)) > 0
    good = has_sampled & (np.abs(mass - 1) < _MASS_TOLERANCE)
    is_good = good[token]
    token = token[is_good]
    ids = ids[is_good]
    sizes = np.bincount(token, minlength=len(content))
    return SamplingMask(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def _spans(spans: list[_Span], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return spans of numbered versions, one after the other from the first token to the last."""
    problem = f"weight-version spans {spans} do not cover {num_tokens} tokens"
    num_covered = 0
    for span in spans:
        if span.start != num_covered or span.end <= span.start:
            raise EngineError(problem)
        num_covered = span.end
    if num_covered != num_tokens:
        raise EngineError(problem)
    found = []
    for span in spans:
        if not span.version.isdecimal():
            raise EngineError(f"weight version {span.version!r} is not a number")
        found.append(VersionSpan(int(span.version), span.start, span.end))
    return tuple(found)


def _with_routes(
    completion: Completion, request: GenerateRequest, encoded: str | None
) -> Completion:
    """Add the routes, whose row T_p - 1 + t sampled token t. Rows before that count as computed by
    the first version: a request that is held computes them anew, but the engine then returns later
    rows only."""
    if encoded is None:
        raise EngineError(
            "expert routes were asked for and are missing",
            remedy="start the engine with --enable-return-routed-experts",
        )
    with raised_as(EngineError, "unreadable expert routes", (ValueError, EOFError, OSError)):
        routes = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    before = len(request.prompt_token_ids) - 1
    first = request.routes_from
    num_rows = before + len(completion.token_ids) - first
    if routes.ndim != 3 or routes.shape[0] != num_rows or routes.dtype not in (np.uint8, np.uint16):
        raise EngineError(
            f"expert routes are {routes.dtype} {routes.shape}, expected uint8 or "
            f"uint16 [{num_rows}, layers, experts per token]"
        )
    spans = []
    for span in completion.versions:
        start = first
        if span.start > 0:
            start = before + span.start
        spans.append(VersionSpan(span.version, start, before + span.end))
    return replace(completion, routes=routes, route_versions=tuple(spans))
