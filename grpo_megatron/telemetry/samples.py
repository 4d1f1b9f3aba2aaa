"""The best and the worst completions of a step, readable: extremes tell more than averages."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Prompt, ScoredGroup, StoredCompletion

Sample = Mapping[str, Any]  # one episode with its scores, see `_sample`; None: not known
Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens too."""


def extremes(
    step: int, groups: Sequence[ScoredGroup], count: int, decode: Decode | None = None
) -> list[Sample]:
    """Return the `count` best, then the `count` worst completions of a step, at most one a group,
    by reward, then by its distance from the group's mean (a lone success comes first).

    decode: shows what the policy has read and all turns of an episode; None: the texts of prompt
    and completion, as they are."""

    found: list[Sample] = []
    for rank, sign in (("best", -1.0), ("worst", 1.0)):
        first_of_groups = []
        for number, group in enumerate(groups):
            first = _first_by_reward(group, sign)
            if first is not None:
                by_reward, by_distance, index = first
                first_of_groups.append((by_reward, by_distance, number, index))
        for _, _, number, index in sorted(first_of_groups)[:count]:
            sample = _sample(rank, step, groups[number], index, decode)
            found.append({**sample, "group": number, "index": index})
    return found


def _first_by_reward(group: ScoredGroup, sign: float) -> tuple[float, float, int] | None:
    """Return the group's sample with the lowest `sign * reward`, as what it is sorted by: that, the
    same of the distance from the mean, its index. None where no sample was scored."""
    scored = np.isfinite(group.rewards)
    if not scored.any():
        return None
    mean = float(group.rewards[scored].mean())
    index = int(np.nanargmin(sign * group.rewards))
    reward = float(group.rewards[index])
    return sign * reward, sign * (reward - mean), index


def write_samples(run_dir: RunDir, step: int, samples: Sequence[Sample]) -> Path:
    """Write samples/step_000123.jsonl, whole or not at all; replaces the step's earlier file."""
    path = run_dir.samples / f"step_{step:06d}.jsonl"
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
    write_atomically(path, "".join(lines))
    return path


def _known(value: float) -> float | None:
    """None for a component that was skipped."""
    if math.isfinite(value):
        return value
    return None


def _texts(completion: StoredCompletion, decode: Decode | None) -> list[str]:
    """Return the text of each sequence of an episode, with what its environment said and the
    markers of the chat template; of a completion its text alone. decode: as of `extremes`."""
    if decode is None or not completion.turns:
        return [sequence.text for sequence in completion.sequences]
    return [decode(sequence.token_ids.tolist()) for sequence in completion.sequences]


def _read_prompt(prompt: Prompt, completion: StoredCompletion, decode: Decode | None) -> str:
    """Return what the policy has read first, which is more than the prompt where an environment,
    lessons or exemplars come with it. Prompts with images stay as they are."""
    first = completion.sequences[0]
    read_ids = first.prompt_ids(prompt)
    if decode is None or prompt.images or read_ids == prompt.token_ids:
        return prompt.text
    return decode(read_ids)


def _sample(rank: str, step: int, group: ScoredGroup, index: int, decode: Decode | None) -> Sample:
    prompt = group.group.prompt
    completion = group.group.completions[index]
    *earlier, text = _texts(completion, decode)
    components = {}
    for name, values in group.components.items():
        components[name] = _known(float(values[index]))
    sample = {
        "rank": rank,
        "step": step,
        "prompt_id": prompt.prompt_id,
        "domain": prompt.domain,
        "prompt": _read_prompt(prompt, completion, decode),
        "answer": prompt.answer,
        "completion": text,
        "reward": float(group.rewards[index]),
        "components": components,
        "length": completion.num_policy_tokens,
        "finish_reason": completion.finish_reason,
    }
    if completion.turns:
        sample |= {
            "earlier": earlier,
            "outcome": _known(completion.outcome),
            "outcome_metrics": dict(completion.outcome_metrics),
        }
    return sample
