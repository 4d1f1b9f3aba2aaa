"""Sequences of episodes in a shard: how they lie there, and with what tokens they begin alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batching.route_file import first_difference, num_routed
from grpo_megatron.types import Completion, RolloutGroup

NO_SEQUENCE = -1


@dataclass(frozen=True)
class ShardOrder:
    """How the sequences of groups lie in a shard: by the tokens that they answer."""

    groups: list[RolloutGroup[Completion]]
    """One for each prompt that is answered, with all sequences that answer it."""
    has_own_prompt: list[bool]
    """Of these, whether the prompt is another than that of the group that was given."""
    places: list[list[int]]
    """Of every completion, in the order given: the numbers of its sequences in the shard, that of
    the completion itself last."""


def shard_order(groups: Sequence[RolloutGroup[Completion]]) -> ShardOrder:
    """Put the sequences of `groups` into the order of a shard: completions without earlier
    sequences or answered ids of their own keep the one that they have."""
    parts: list[RolloutGroup[Completion]] = []
    has_own_prompt: list[bool] = []
    places: list[list[int]] = []
    num_before = 0
    for group in groups:
        by_prompt: dict[tuple[int, ...], list[Completion]] = {}
        for completion in group.completions:
            for sequence in completion.sequences:
                by_prompt.setdefault(sequence.prompt_ids(group.prompt), []).append(sequence)
        next_number = {}
        for prompt_ids, sequences in by_prompt.items():
            next_number[prompt_ids] = num_before
            num_before += len(sequences)
            prompt = replace(group.prompt, token_ids=prompt_ids)
            parts.append(RolloutGroup(prompt, tuple(sequences), group.replica))
            has_own_prompt.append(prompt_ids != group.prompt.token_ids)
        for completion in group.completions:
            of_completion = []
            for sequence in completion.sequences:
                prompt_ids = sequence.prompt_ids(group.prompt)
                of_completion.append(next_number[prompt_ids])
                next_number[prompt_ids] += 1
            places.append(of_completion)
    return ShardOrder(parts, has_own_prompt, places)


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that begins as an earlier one of its episode."""

    after: int
    """The row of the earlier one; -1: of none."""
    num_tokens: int
    """How many tokens are the same, of prompt and response. Where there are routes, these are the
    same, too; the last token of a sequence has none, and is not shared."""
    is_cut: bool
    """Whether more tokens are the same, on which the engine's routes differ."""


def fork_columns(
    places: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    with_routes: bool,
) -> dict[str, np.ndarray]:
    """Return what later sequences of episodes share with those before; no columns where all are
    single.

    places: as of `ShardOrder`; prompts, completions: of every sample of the shard."""
    if all(len(of_episode) == 1 for of_episode in places):
        return {}
    forks = [Fork(NO_SEQUENCE, 0, False)] * len(completions)
    for of_episode in places:
        tokens = []
        for place in of_episode:
            prompt_ids = np.asarray(prompts[place], np.int32)
            tokens.append(np.concatenate([prompt_ids, completions[place].token_ids]))
        routed = None
        if with_routes:
            routed = [(completions[place], len(prompts[place])) for place in of_episode]
        for number, place in enumerate(of_episode):
            found = _fork(number, tokens, routed)
            if found.after != NO_SEQUENCE:
                found = replace(found, after=of_episode[found.after])
            forks[place] = found
    return {
        "fork_after": np.array([fork.after for fork in forks], np.int64),
        "fork_tokens": np.array([fork.num_tokens for fork in forks], np.int64),
        "fork_is_cut": np.array([fork.is_cut for fork in forks], np.uint8),
    }


def _fork(
    number: int,
    tokens: Sequence[np.ndarray],
    routed: Sequence[tuple[Completion, int]] | None,
) -> Fork:
    """Return what sequence `number` of an episode shares with an earlier one, by its number there.

    tokens: of prompt and response, by sequence; routed: response and length of the prompt, where
    routes must be the same, too."""
    num_equal = []
    for earlier in range(number):
        equal = _num_equal_tokens(tokens[earlier], tokens[number])
        if routed is not None:
            equal = min(equal, num_routed(*routed[earlier]), num_routed(*routed[number]))
        num_equal.append(equal)
    best = Fork(NO_SEQUENCE, 0, False)
    # the longest first: routes of the others are read only where it is cut short
    for earlier in np.argsort([-equal for equal in num_equal], kind="stable").tolist():
        if num_equal[earlier] <= best.num_tokens:
            break
        num_shared = num_equal[earlier]
        if routed is not None:
            one, num_prompt = routed[earlier]
            other, num_other_prompt = routed[number]
            num_shared = first_difference(one, num_prompt, other, num_other_prompt, num_shared)
        if num_shared > best.num_tokens:
            best = Fork(earlier, num_shared, False)
    return replace(best, is_cut=best.num_tokens < max(num_equal, default=0))


def _num_equal_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Count the equal tokens with which two sequences begin, int32 both."""
    num_compared = min(len(one), len(other))
    differs = one[:num_compared] != other[:num_compared]
    if not differs.any():
        return num_compared
    return int(differs.argmax())
