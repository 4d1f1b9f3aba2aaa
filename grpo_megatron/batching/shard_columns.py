"""The columns of a shard: prompts, completions, and what is known of their tokens.

N samples of Q prompts. A sample is a sequence: an episode with earlier sequences has several
(`batching.sequences.shard_order`). A prompt is stored once for all samples that answer it.

    prompt_ids                  int32, with prompt_offsets int64 [Q+1]
    image_digest                uint8 [M, 32], with image_offsets int64 [Q+1]
    image_start|rows|columns    int32 [M]
    completion_ids              int32, with completion_offsets int64 [N+1]
    rollout_logprobs            float32, by completion token
    group                       int32 [N], the number of the prompt
    span_version|start|end      int32, spans of weight versions, with span_offsets int64 [N+1]
    kept_ids                    int32, ids that truncated sampling kept, with kept_offsets
                                int64 [n+1] by completion token
    turn_start|end              int32, with turn_offsets int64 [N+1]
    turn_reward                 float64
    turn_spoilt                 uint8
    turn_state                  int32, the number of a text; -1: not known
    state_texts                 uint8 (UTF-8), with state_offsets int64
    fork_after                  int64 [N], the earlier sequence that this one continues (`Fork`);
                                -1: none
    fork_tokens                 int64 [N]
    fork_is_cut                 uint8 [N]

Images, kept ids, turns and forks have columns only where a sample of the shard has some."""

import itertools
from collections.abc import Sequence

import numpy as np

from grpo_megatron.batching.ragged import concatenate, offsets, ragged
from grpo_megatron.batching.sequences import ShardOrder, fork_columns
from grpo_megatron.types import Completion, PromptImage, Turn

UNKNOWN_STATE = -1


def shard_columns(order: ShardOrder, *, with_routes: bool) -> dict[str, np.ndarray]:
    """Return the columns of a shard, by name. with_routes: forks end where routes differ."""
    prompts: list[Sequence[int]] = []
    images: list[tuple[PromptImage, ...]] = []
    completions: list[Completion] = []
    group_of: list[int] = []
    for number, group in enumerate(order.groups):
        prompts.append(group.prompt.token_ids)
        images.append(group.prompt.images)
        completions += group.completions
        group_of += [number] * len(group.completions)
    prompt_ids, prompt_offsets = ragged(prompts, np.int32)
    columns = {"prompt_ids": prompt_ids, "prompt_offsets": prompt_offsets}
    columns |= _image_columns(images)
    columns |= _completion_columns(completions)
    columns["group"] = np.array(group_of, np.int32)
    columns |= _span_columns(completions)
    columns |= _kept_columns(completions)
    columns |= _turn_columns(completions)
    prompts_of = [prompts[number] for number in group_of]
    columns |= fork_columns(order.places, prompts_of, completions, with_routes=with_routes)
    return columns


def _image_columns(images: Sequence[Sequence[PromptImage]]) -> dict[str, np.ndarray]:
    """Return the columns of images; none where no prompt has any."""
    if not any(images):
        return {}
    flat = list(itertools.chain.from_iterable(images))
    digests = b"".join(bytes.fromhex(image.digest) for image in flat)
    return {
        "image_digest": np.frombuffer(digests, np.uint8).reshape(len(flat), -1),
        "image_start": np.array([image.start for image in flat], np.int32),
        "image_rows": np.array([image.rows for image in flat], np.int32),
        "image_columns": np.array([image.columns for image in flat], np.int32),
        "image_offsets": offsets([len(of_prompt) for of_prompt in images]),
    }


def _completion_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Return the columns of completion tokens."""
    token_ids = []
    logprobs = []
    for completion in completions:
        token_ids.append(completion.token_ids)
        logprobs.append(completion.logprobs)
    completion_ids, completion_offsets = ragged(token_ids, np.int32)
    return {
        "completion_ids": completion_ids,
        "rollout_logprobs": concatenate(logprobs, np.float32),
        "completion_offsets": completion_offsets,
    }


def _span_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Return the columns that say which weight version sampled which tokens."""
    spans: list[tuple[int, int, int]] = []
    num_spans = []
    for completion in completions:
        num_spans.append(len(completion.versions))
        for span in completion.versions:
            spans.append((span.version, span.start, span.end))
    columns = np.array(spans, np.int32).reshape(-1, 3)
    return {
        "span_version": columns[:, 0],
        "span_start": columns[:, 1],
        "span_end": columns[:, 2],
        "span_offsets": offsets(num_spans),
    }


def _kept_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Return the columns of sampling masks; none where no completion has one."""
    if all(completion.kept is None for completion in completions):
        return {}
    ids = []
    sizes = []
    for completion in completions:
        if completion.kept is None:
            sizes.append(np.zeros(len(completion.token_ids), np.int64))
        else:
            ids.append(completion.kept.ids)
            sizes.append(completion.kept.sizes)
    return {
        "kept_ids": concatenate(ids, np.int32),
        "kept_offsets": offsets(concatenate(sizes, np.int64)),
    }


def _turn_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Return the columns of turns; none where no completion has any."""
    if not any(completion.turns for completion in completions):
        return {}
    turns: list[Turn] = []
    num_turns = []
    number_of: dict[str, int] = {}
    for completion in completions:
        num_turns.append(len(completion.turns))
        for turn in completion.turns:
            turns.append(turn)
            if turn.state:
                number_of.setdefault(turn.state, len(number_of))
    states = [state.encode("utf-8", "surrogatepass") for state in number_of]
    number_of[""] = UNKNOWN_STATE
    return {
        "turn_start": np.array([turn.start for turn in turns], np.int32),
        "turn_end": np.array([turn.end for turn in turns], np.int32),
        "turn_reward": np.array([turn.reward for turn in turns], np.float64),
        "turn_spoilt": np.array([turn.spoilt for turn in turns], np.uint8),
        "turn_state": np.array([number_of[turn.state] for turn in turns], np.int32),
        "turn_offsets": offsets(num_turns),
        "state_texts": np.frombuffer(b"".join(states), np.uint8),
        "state_offsets": offsets([len(state) for state in states]),
    }
