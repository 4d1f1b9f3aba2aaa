"""A completion as a chain of segments: one request each, for the prompt and all tokens so far.

A segment ends with its completion, after `rollout.segment_tokens`, or where a pause aborted it.
A replica that dies costs one segment, and tokens sampled before new weights came are kept, with
the version, log-probs and routes of their own time."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.types import Completion, SamplingMask, VersionSpan

Ask = Callable[..., Awaitable[list[Completion]]]  # (ids, n=, max_tokens=, seed=, routes_from=)

_MAX_EMPTY = 100  # aborted segments without a token in a row: publishes before their turn


async def complete(
    ask: Ask,
    prompt: Sequence[int],
    *,
    n: int,
    max_tokens: int,
    segment_tokens: int | None = None,
    seed: int | None = None,
    routes_from: int = 0,
) -> list[Completion]:
    """`n` whole completions of a prompt, in segments of at most `segment_tokens`; without, only
    aborted ones are continued. Segments after the first derive their seeds from `seed` and their
    position, because an engine cannot enter a seed's random numbers midway.

    routes_from: the first row of the completions' routes. Raises EngineError: segments are aborted
    without end; and what `ask` raises."""
    longest = min(segment_tokens or max_tokens, max_tokens)
    heads = await ask(prompt, n=n, max_tokens=longest, seed=seed, routes_from=routes_from)

    async def finish(child: int, whole: Completion) -> Completion:
        num_empty = 0
        goal = longest
        while len(whole.token_ids) < max_tokens and _goes_on(whole, goal):
            done = len(whole.token_ids)
            goal = min(done + longest, max_tokens)
            own_seed = None
            if seed is not None:
                own_seed = derive_seed(seed + child, "segment", done)
            first_row = routes_from
            if done:
                first_row = len(prompt) + done - 1
            (tail,) = await ask(
                [*prompt, *whole.token_ids.tolist()],
                n=1,
                max_tokens=goal - done,
                seed=own_seed,
                routes_from=first_row,
            )
            num_empty += 1
            if len(tail.token_ids):
                num_empty = 0
            if num_empty >= _MAX_EMPTY:
                raise EngineError(
                    f"a request was aborted {num_empty} times before its next token",
                    remedy="publish less often, or set publish.pause=keep",
                )
            whole = merge(whole, tail, len(prompt) - routes_from)
        if whole.finish_reason == "stop":
            return whole
        return replace(whole, finish_reason="length")

    wholes = [finish(child, head) for child, head in enumerate(heads)]
    return await finish_or_cancel(wholes)


def _goes_on(part: Completion, goal: int) -> bool:
    """Aborted, or cut at its goal; one that is cut before has filled the engine's context."""
    return part.finish_reason == "abort" or (
        part.finish_reason == "length" and len(part.token_ids) == goal
    )


def merge(head: Completion, tail: Completion, num_prompt: int) -> Completion:
    """`head` and the segment that continues it.

    num_prompt: tokens of the prompt that `head.routes` has rows of. Rows of `head.routes` stay as
    they were computed; `tail.routes` begins with the row that sampled its first token, [T, L, K]. A
    side without routes leaves its rows uncovered."""
    done = len(head.token_ids)
    if not done:
        return tail
    if not len(tail.token_ids):
        return replace(head, finish_reason=tail.finish_reason)
    shifted = [VersionSpan(s.version, s.start + done, s.end + done) for s in tail.versions]
    return Completion(
        np.concatenate([head.token_ids, tail.token_ids]),
        np.concatenate([head.logprobs, tail.logprobs]),
        _joined([*head.versions, *shifted]),
        tail.finish_reason,
        text="",
        routes=_merged_routes(head, tail, num_prompt),
        kept=_merged_kept(head.kept, tail.kept),
        route_versions=_joined([*head.route_versions, *tail.route_versions]),
    )


def _merged_kept(head: SamplingMask | None, tail: SamplingMask | None) -> SamplingMask | None:
    if head is None or tail is None:
        return None
    return SamplingMask(
        np.concatenate([head.ids, tail.ids]),
        np.concatenate([head.offsets, head.offsets[-1] + tail.offsets[1:]]),
    )


def _merged_routes(head: Completion, tail: Completion, num_prompt: int) -> np.ndarray | None:
    """Return rows of both [T, L, K], zeros where one side has none; None where neither has."""
    first = head.routes
    second = tail.routes
    if first is None and second is None:
        return None
    if first is None:
        assert second is not None
        num_rows = num_prompt + len(head.token_ids) - 1
        first = np.zeros((num_rows, *second.shape[1:]), second.dtype)
    if second is None:
        second = np.zeros((len(tail.token_ids), *first.shape[1:]), first.dtype)
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        raise EngineError(
            "segments of one completion have routes of shapes "
            f"{[first.shape[1:], second.shape[1:]]}",
            remedy="all engines must serve the same model",
        )
    merged: np.ndarray = np.concatenate([first, second])
    return merged


def _joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join neighbouring spans of one version."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            span = VersionSpan(span.version, joined.pop().start, span.end)
        joined.append(span)
    return tuple(joined)
