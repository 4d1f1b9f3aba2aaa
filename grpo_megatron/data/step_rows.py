"""From a row's fields to an answer whose steps have labels, in TRL's format of stepwise supervision
(https://huggingface.co/docs/trl/dataset_formats), and such an answer as tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.preference_rows import problem_of
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Completion, Problem, Prompt, Turn, VersionSpan

STEPS = "completions"
LABELS = "labels"


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row: `StepRow(problem, ("2 + 2 = 4.", "4 * 3 = 11."), (1.0, 0.0))`."""

    problem: Problem
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    """By step: 1: right; 0: wrong; between them: how likely it is right."""


def step_row_of(where: str, fields: Mapping[str, Any], domain: DomainConfig) -> StepRow:
    """Return the steps of a row. DataError names the row and what is wrong in it."""
    for name, kind in {STEPS: "texts", LABELS: "true or false, or numbers from 0 to 1"}.items():
        if fields.get(name) is None:
            raise DataError(
                f"the row has no {name!r}; it has: {', '.join(fields) or 'nothing'}",
                where=where,
                remedy=f"loss stepwise takes {STEPS!r} and {LABELS!r}, one of each for a step",
            )
        if not isinstance(fields[name], list | tuple):
            raise DataError(
                f"{name!r} is {type(fields[name]).__name__}, expected a list of {kind}",
                where=where,
            )
    steps = _texts(where, fields[STEPS])
    labels = tuple(_label(where, number, one) for number, one in enumerate(fields[LABELS]))
    if len(steps) != len(labels):
        raise DataError(
            f"{len(steps)} {STEPS!r} and {len(labels)} {LABELS!r}",
            where=where,
            remedy="give every step one label",
        )
    problem = problem_of(
        where, fields, domain, (), answers=("".join(steps),), without=(STEPS, LABELS)
    )
    return StepRow(problem, steps, labels)


def _texts(where: str, values: Sequence[Any]) -> tuple[str, ...]:
    for number, one in enumerate(values):
        if not isinstance(one, str):
            raise DataError(
                f"step {number} of {STEPS!r} is {type(one).__name__}, expected a text", where=where
            )
    return tuple(values)


def _label(where: str, number: int, value: Any) -> float:
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise DataError(
        f"label {number} of {LABELS!r} is {value!r}, expected true, false or a number from 0 to 1",
        where=where,
        remedy="true says that the step is right, a number how likely it is",
    )


def id_of_step_token(tokenizer: TextTokenizer, step_token: str) -> int:
    """Return the one token that stands behind every step; DataError where it is several."""
    try:
        ids = tokenizer.encode(step_token)
        problem = f"is {len(ids)} tokens of the model's tokenizer"
    except DataError:
        ids = []
        problem = "cannot be written with the model's tokenizer"
    if len(ids) == 1:
        return ids[0]
    names = [repr(token.content) for token in tokenizer.added_tokens.values()]
    raise DataError(
        f"the step token {step_token!r} {problem}",
        where="preferences.step_token",
        remedy="give a text that is one token of it (its added ones: "
        f"{', '.join(names) or 'none'}), or add one to the tokenizer",
    )


def bare_step(step: str, step_token: str) -> str:
    """Return a step without white space around it and without the mark that may end it already."""
    return step.strip().removesuffix(step_token)


def why_no_steps(row: StepRow, step_token: str) -> str:
    """Why the texts of a row cannot be read step by step; empty: they can."""
    if not row.steps:
        return "without steps"
    bare = [bare_step(step, step_token) for step in row.steps]
    if not all(step.strip() for step in bare):
        return "with an empty step"
    if any(step_token in step for step in bare):
        return f"with the step token {step_token!r} inside of a step"
    return ""


def marked_answer(
    row: StepRow, prompt: Prompt, tokenizer: TextTokenizer, step_token: str
) -> Completion | str:
    """Return the steps as a process reward model reads them (`rewards.step_rewards`): without white
    space around them and with `step_token` behind each. Else a text: why a server, which gets
    prompt and steps as one text, would not read them so.

    A step is a turn of one token: the one behind its step token, so that the position of the step
    token is looked at; the last one stands twice for it. Turns have the labels as rewards."""
    step_token_id = id_of_step_token(tokenizer, step_token)
    ids: list[int] = []
    turns = []
    text = ""
    for step, label in zip(row.steps, row.labels, strict=True):
        bare = bare_step(step, step_token)
        ids += [*tokenizer.encode(bare), step_token_id]
        turns.append(Turn(len(ids), len(ids) + 1, label))
        text += bare + step_token
    if step_token_id in prompt.token_ids:
        return f"with the step token {step_token!r} in the prompt"
    if ids.count(step_token_id) > len(turns):
        return f"with the step token {step_token!r} inside of a step"
    if tokenizer.encode(prompt.text + text) != [*prompt.token_ids, *ids]:
        return f"with steps that the tokenizer joins with {step_token!r} or the prompt"
    ids.append(step_token_id)
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[[turn.start for turn in turns]] = -np.inf
    span = (VersionSpan(0, 0, len(ids)),)
    return Completion(np.array(ids, np.int32), logprobs, span, "stop", text, turns=tuple(turns))
