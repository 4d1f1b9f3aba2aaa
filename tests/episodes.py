"""Episodes for tests: turns of the policy, tokens of an environment between them, sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from grpo_megatron.types import Completion, Prompt, RolloutGroup, SamplingMask, Turn, VersionSpan

PIECE = tuple[int, bool]
"""So many tokens, and whether the policy sampled them."""


def sequence_of(
    pieces: Sequence[PIECE],
    rng: np.random.Generator,
    *,
    vocabulary: int = 100,
    states: Sequence[str] = (),
    rewards: Sequence[float] = (),
    spoilt: Sequence[int] = (),
    **more,
) -> Completion:
    """A response of these pieces; states and rewards: of turns, spoilt: numbers of turns."""
    turns: list[Turn] = []
    num_tokens = sum(length for length, _ in pieces)
    logprobs = np.full(num_tokens, np.nan, np.float32)
    start = 0
    for length, is_policy in pieces:
        end = start + length
        if is_policy:
            number = len(turns)
            state = states[number] if number < len(states) else ""
            reward = rewards[number] if number < len(rewards) else math.nan
            turns.append(Turn(start, end, reward, state, number in spoilt))
            logprobs[start:end] = -rng.random(length, np.float32) - 0.1
        start = end
    more.setdefault("versions", (VersionSpan(0, 0, num_tokens),))
    more.setdefault("finish_reason", "stop")
    more.setdefault("text", "")
    return Completion(
        token_ids=rng.integers(2, vocabulary, num_tokens).astype(np.int32),
        logprobs=logprobs,
        turns=tuple(turns),
        **more,
    )


@st.composite
def pieces(draw) -> list[PIECE]:
    """Some pieces with tokens, at least one of them the policy's."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    is_policy = draw(st.booleans())
    found = []
    for size in sizes:
        found.append((size, is_policy))
        is_policy = not is_policy
    if not any(of_policy for _, of_policy in found):
        found.append((draw(st.integers(1, 4)), True))
    return found


@st.composite
def sequences(draw) -> Completion:
    """A response with turns, or now and then a plain completion."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    states = draw(st.lists(st.sampled_from(["", "a", "é\ud800", "a b"]), max_size=3))
    rewards = draw(st.lists(st.sampled_from([math.nan, 0.0, 1.5]), max_size=3))
    found = sequence_of(
        draw(pieces()),
        rng,
        states=states,
        rewards=rewards,
        spoilt=draw(st.lists(st.integers(0, 2), max_size=1)),
        text=draw(st.text(max_size=3)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        outcome=draw(st.sampled_from([math.nan, -1.0, 0.25])),
    )
    return found


@st.composite
def episodes(draw) -> Completion:
    """Up to three sequences, each behind tokens of its own where a template rewrote history."""
    earlier = []
    for _ in range(draw(st.integers(0, 2))):
        answered = draw(st.sampled_from([None, (5,), (5, 6, 7), (9, 9)]))
        earlier.append(replace(draw(sequences()), answered_ids=answered))
    last = draw(sequences())
    answered = None
    if earlier:
        answered = draw(st.sampled_from([None, (5, 6, 7), (8,)]))
    return replace(last, earlier=tuple(earlier), answered_ids=answered)


@st.composite
def groups(draw) -> list[RolloutGroup[Completion]]:
    """Up to three prompts with episodes."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        completions = draw(st.lists(episodes(), min_size=1, max_size=3))
        prompt = Prompt(f"p{number}", "d", "", (number + 1, 2), "")
        found.append(RolloutGroup(prompt, tuple(completions), 0))
    return found


def with_kept(sequence: Completion, rng: np.random.Generator) -> Completion:
    """The same with sets of kept ids: of its policy tokens the token and another one, of the
    environment's none."""
    sizes = np.where(sequence.policy_mask, 2, 0)
    ids = []
    for token, size in zip(sequence.token_ids.tolist(), sizes.tolist(), strict=True):
        if size:
            ids += [token, int(rng.integers(2, 50))]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return replace(sequence, kept=SamplingMask(np.array(ids, np.int32), offsets))
