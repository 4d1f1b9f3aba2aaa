"""What the config.json of a reward model says of its scalars."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.checkpoints import durable
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.reward_labels import (
    REMEDY,
    SCALARS,
    STEP_TOKEN_FIELD,
    RewardHead,
    other_labels,
    written_labels,
)

ONE_SCORE = RewardHead(tuple(written_labels(())), SCALARS)
"""Of whole answers, without a name."""


def mark_as_reward_model(
    directory: Path,
    head: RewardHead = ONE_SCORE,
    answer_ends: Collection[int] | None = (),
) -> None:
    """Let the config.json of an export say that it is a reward model with this head, as
    transformers (`…ForSequenceClassification`) and vLLM (`/pooling`) read it.

    transformers takes the scalars at the last token that is no padding, so a padding token that
    also ends answers (`eos_token_id`, or one of `answer_ends`) is left out, and any where these are
    not known (None): without one it reads one text at a time."""
    file = directory / "config.json"
    hf = json.loads(file.read_text(encoding="utf-8-sig"))
    names = hf.get("architectures") or [family_of(hf.get("model_type")).architecture]
    hf["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in names
    ]
    hf["id2label"] = {str(number): name for number, name in enumerate(head.labels)}
    hf["label2id"] = {name: number for number, name in enumerate(head.labels)}
    hf["problem_type"] = head.problem_type
    hf.pop(STEP_TOKEN_FIELD, None)
    if head.step_token is not None:
        hf[STEP_TOKEN_FIELD] = head.step_token
    ends = hf.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [ends]
    if answer_ends is None or hf.get("pad_token_id") in (*ends, *answer_ends):
        hf["pad_token_id"] = None
    durable.write_json(file, hf)


def refuse_other_labels(hf: Mapping[str, Any], labels: Sequence[str], directory: Path) -> None:
    """CheckpointError where the checkpoint that a reward model begins with is one with other
    scalars than `labels`, or than one. hf: its config.json."""
    problem = other_labels(hf, labels)
    if problem:
        raise CheckpointError(problem, where=str(directory / "config.json"), remedy=REMEDY)
