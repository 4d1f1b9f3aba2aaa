"""From a row's fields to a preference: a pair of a chosen and a rejected answer, or one answer with
a label, in the formats of TRL (https://huggingface.co/docs/trl/dataset_formats) and of data sets on
the Hugging Face hub."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.templates import CHAT
from grpo_megatron.data.conversation import (
    MESSAGES,
    TELLING_REMEDY,
    Message,
    is_conversation,
    read_messages,
    require_user,
    split_reply,
    untold_fields,
    without_json,
)
from grpo_megatron.data.row_formats import (
    conversation_in_field,
    prompt_field_of,
    question_in,
    question_of,
)
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem

PROMPT = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
COMPLETION = "completion"
LABEL = "label"
MARGIN = "margin"
_ANSWERS = (CHOSEN, REJECTED, COMPLETION)
_LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
"""As CSV has them, in small letters."""


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A row: `PreferenceRow(problem, ("85", "7"), (1.0, 0.0))`."""

    problem: Problem
    answers: tuple[str, ...]
    """The chosen and the rejected one, or the only one."""
    labels: tuple[float, ...]
    """1: chosen, or desirable; 0: rejected, or undesirable."""
    margin: float = 0.0
    """By how much the chosen one is better, where the row says so."""


def preference_of(
    where: str, fields: Mapping[str, Any], domain: DomainConfig, *, is_paired: bool
) -> PreferenceRow:
    """Return the preference of a row; `is_paired`: of two answers, else a pair becomes the labels
    of both.

    The prompt is a text or a conversation in a field of its own, or what the conversations `chosen`
    and `rejected` have in common before their last message. A table may have rows of both kinds; a
    row that has both is refused where labelled answers are trained. A `completion` without a label
    beside a pair is the row's own. DataError names the row and what is wrong in it."""
    has_pair = not all(_is_empty(fields.get(name)) for name in (CHOSEN, REJECTED))
    has_completion = not _is_empty(fields.get(COMPLETION))
    is_labelled = has_completion and not _is_empty(fields.get(LABEL))
    if has_pair and is_labelled and not is_paired:
        raise DataError(
            f"the row has a pair and a {COMPLETION!r} with a label, of which one would be lost",
            where=where,
            remedy=f"make two rows of it, one with {CHOSEN!r} and {REJECTED!r}, one with "
            f"{COMPLETION!r} and {LABEL!r}",
        )
    if not has_pair and not has_completion:  # answers that are empty, which are counted
        has_pair = any(fields.get(name) is not None for name in (CHOSEN, REJECTED))
        has_completion = fields.get(COMPLETION) is not None
    if not has_pair and not has_completion:
        raise DataError(
            f"the row has neither {CHOSEN!r} and {REJECTED!r} nor {COMPLETION!r} and {LABEL!r}; it "
            f"has: {', '.join(fields) or 'nothing'}",
            where=where,
            remedy="rename its fields",
        )
    if not has_pair:
        return _of_label(where, fields, domain, is_paired=is_paired)
    for name in (CHOSEN, REJECTED):
        if fields.get(name) is None:
            raise DataError(
                f"the row has no {name!r}; it has: {', '.join(fields)}",
                where=where,
                remedy=f"give it {CHOSEN!r} and {REJECTED!r}, or leave it out",
            )
    chosen, of_chosen = _answer(where, fields, CHOSEN, domain)
    rejected, of_rejected = _answer(where, fields, REJECTED, domain)
    if of_chosen != of_rejected:
        raise DataError(
            f"{CHOSEN!r} and {REJECTED!r} differ before their last message, so that they answer "
            "different conversations",
            where=where,
            remedy="only the last message of each may differ",
        )
    _refuse_other_prompt(where, fields, domain, CHOSEN, of_chosen)
    problem = problem_of(where, fields, domain, of_chosen, answers=(chosen, rejected))
    return PreferenceRow(problem, (chosen, rejected), (1.0, 0.0), _margin(where, fields))


def _is_empty(value: object) -> bool:
    """Whether a field says nothing. A table of pairs and labelled answers has all columns in every
    row: null or an empty list where nothing is meant, in CSV an empty text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == []


def _of_label(
    where: str, fields: Mapping[str, Any], domain: DomainConfig, *, is_paired: bool
) -> PreferenceRow:
    if is_paired:
        raise DataError(
            f"the row has one {COMPLETION!r} with a label, and this run compares two answers",
            where=where,
            remedy='set preferences.loss = "kto", or give rows "chosen" and "rejected"',
        )
    answer, conversation = _answer(where, fields, COMPLETION, domain)
    label = _label(where, fields)
    _refuse_other_prompt(where, fields, domain, COMPLETION, conversation)
    problem = problem_of(where, fields, domain, conversation, answers=(answer,))
    return PreferenceRow(problem, (answer,), (label,))


def _label(where: str, fields: Mapping[str, Any]) -> float:
    label = fields.get(LABEL)
    if isinstance(label, str) and label.strip().lower() in _LABELS:
        return _LABELS[label.strip().lower()]
    if isinstance(label, bool | int | float) and label in (0, 1):
        return float(label)
    raise DataError(
        f"{LABEL!r} is {label!r}, expected true or false",
        where=where,
        remedy="true says that the answer is desirable",
    )


def _margin(where: str, fields: Mapping[str, Any]) -> float:
    margin = fields.get(MARGIN)
    if margin is None or (isinstance(margin, str) and not margin.strip()):  # CSV has no null
        return 0.0
    number = math.nan
    if isinstance(margin, str | int | float) and not isinstance(margin, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(margin)
    if not math.isfinite(number):
        raise DataError(
            f"{MARGIN!r} is {margin!r}, expected a finite number",
            where=where,
            remedy="it says by how much the chosen answer is better; leave it out where that is "
            "unknown",
        )
    return number


def _answer(
    where: str, fields: Mapping[str, Any], name: str, domain: DomainConfig
) -> tuple[str, list[Message]]:
    """(the answer's text, the conversation before it, empty where the field is the answer only)."""
    value = without_json(fields[name])
    if isinstance(value, str):
        return value, []
    if not is_conversation(value):
        raise DataError(
            f"field {name!r} is {type(value).__name__}, expected text or a list of messages",
            where=where,
        )
    if domain.template != CHAT:
        raise DataError(
            f"field {name!r} is a conversation, which no template of one question can render",
            where=where,
            remedy='set template = "chat" of the domain',
        )
    messages = read_messages(value, where=where, field=name)
    is_answer_only = len(messages) == 1
    if not is_answer_only:
        require_user(messages, where=where, field=name)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last message of {name!r} is of {messages[-1]['role']!r}",
            where=where,
            remedy="an answer is a message of the assistant",
        )
    untold = untold_fields(messages[-1])
    if untold:
        raise DataError(
            f"the last message of {name!r} has {untold[0]!r}, and its content alone would be "
            "trained",
            where=where,
            remedy=TELLING_REMEDY,
        )
    if is_answer_only:
        return messages[-1]["content"], []
    return messages[-1]["content"], messages[:-1]


def _refuse_other_prompt(
    where: str,
    fields: Mapping[str, Any],
    domain: DomainConfig,
    name: str,
    conversation: Sequence[Message],
) -> None:
    """Raise DataError where the row has a prompt of its own that is no part of the conversation in
    the field `name`, which would be trained in its place."""
    if not conversation:
        return
    for field in sorted({domain.prompt_field, PROMPT}):
        value = without_json(fields.get(field))
        agrees = True
        if isinstance(value, str):
            agrees = _is_said(value, conversation)
        elif is_conversation(value):
            agrees = _is_part(read_messages(value, where=where, field=field), conversation)
        if not agrees:
            raise DataError(
                f"{field!r} says something else than {name!r} does before its last message",
                where=where,
                remedy=f"make them equal, or leave {field!r} out",
            )


def _is_said(text: str, conversation: Sequence[Message]) -> bool:
    """Whether a text has a message of the conversation, or is part of one; white space aside. Data
    sets have the first question there, the last one, or all that was said."""
    text = " ".join(text.split())
    for message in conversation:
        said = " ".join(message["content"].split())
        if text in said or (said and said in text):
            return True
    return False


def _is_part(messages: Sequence[Message], conversation: Sequence[Message]) -> bool:
    """Whether the conversation has all these messages, in their order."""
    num_found = 0
    for message in conversation:
        if num_found == len(messages):
            break
        wanted = messages[num_found]
        if message["role"] == wanted["role"] and message["content"] == wanted["content"]:
            num_found += 1
    return num_found == len(messages)


def problem_of(
    where: str,
    fields: Mapping[str, Any],
    domain: DomainConfig,
    conversation: Sequence[Message],
    *,
    answers: Sequence[str],
    without: Sequence[str] = _ANSWERS,
) -> Problem:
    """Return what the answers answer: `conversation`, or where it is empty the row's prompt. One
    that ends with an answer of the row, as those of samples do, is meant up to there.

    without: fields that are no metadata, those of the answers. Raises DataError where there is no
    prompt, or where it ends with something else that the assistant says."""
    metadata = {name: value for name, value in fields.items() if name not in without}
    metadata.pop(MESSAGES, None)
    if not conversation:
        field = prompt_field_of(where, fields, domain)
        if not is_conversation(without_json(fields[field])):
            return Problem(question_of(where, fields, field), "", metadata)
        messages = conversation_in_field(where, fields, field, domain)
        conversation, reply = split_reply(messages)
        without_blanks = ["".join(answer.split()) for answer in answers]
        if reply is not None and "".join(reply.split()) not in without_blanks:
            raise DataError(
                f"the conversation in {field!r} ends with a message of the assistant, which is "
                "none of the answers",
                where=where,
                remedy="end it with the message that is answered",
            )
    metadata[MESSAGES] = list(conversation)
    return Problem(question_in(where, conversation), "", metadata)
