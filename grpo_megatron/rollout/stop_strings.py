"""Stop strings: a turn ends with the token that completes one, as behind a server.

The engine samples without them. What it has sampled behind that token is dropped: whether a turn
has ended depends on its tokens alone, so that those that stay are sampled as any others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_megatron.types import Completion, SamplingMask, VersionSpan


def num_tokens_to_stop(
    text_of: Callable[[int], str], num_tokens: int, stops: Sequence[str]
) -> int | None:
    """Return how many tokens of a turn there are up to the first that completes one of `stops`;
    None: no token does. text_of: decodes a number of tokens."""
    if first_stop(text_of(num_tokens), stops) is None:
        return None
    low = 1
    high = num_tokens
    while low < high:
        middle = (low + high) // 2
        if first_stop(text_of(middle), stops) is None:
            low = middle + 1
        else:
            high = middle
    return low


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of `stops` in the text begins; None: there is none."""
    places = [text.find(stop) for stop in stops]
    return min((place for place in places if place >= 0), default=None)


def first_tokens(completion: Completion, num_tokens: int, num_prompt: int) -> Completion:
    """Return the first tokens of a turn as a turn that has stopped there, with their log-probs,
    versions, routes and kept ids. num_prompt: tokens of the request that it answers."""
    routes = completion.routes
    if routes is not None:
        num_dropped = completion.num_tokens - num_tokens
        routes = routes[: len(routes) - num_dropped]
    kept = completion.kept
    if kept is not None:
        offsets = kept.offsets[: num_tokens + 1]
        kept = SamplingMask(kept.ids[: offsets[-1]], offsets)
    return replace(
        completion,
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        versions=_first(completion.versions, num_tokens),
        finish_reason="stop",
        routes=routes,
        route_versions=_first(completion.route_versions, num_prompt + num_tokens - 1),
        kept=kept,
    )


def _first(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    found = []
    for span in spans:
        if span.start < end:
            found.append(VersionSpan(span.version, span.start, min(span.end, end)))
    return tuple(found)
