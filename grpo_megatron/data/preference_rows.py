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
    Message,
    is_conversation,
    last_question,
    read_conversation,
    split_reply,
)
from grpo_megatron.data.row_formats import conversation_of, prompt_field_of, text_of
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem

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
    and `rejected` have in common before their last message. DataError names the row and what is
    wrong in it."""
    has_pair = CHOSEN in fields or REJECTED in fields
    if not has_pair and COMPLETION not in fields:
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
    problem = problem_of(where, fields, domain, of_chosen)
    return PreferenceRow(problem, (chosen, rejected), (1.0, 0.0), _margin(where, fields))


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
    problem = problem_of(where, fields, domain, conversation)
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
    value = fields[name]
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
    is_answer_only = isinstance(value, list) and len(value) == 1
    if is_answer_only:  # `read_conversation` wants a user in it
        value = [{"role": "user", "content": ""}, *value]
    messages = read_conversation(value, where=where, field=name)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last message of {name!r} is of {messages[-1]['role']!r}",
            where=where,
            remedy="an answer is a message of the assistant",
        )
    if is_answer_only:
        return messages[-1]["content"], []
    return messages[-1]["content"], messages[:-1]


def problem_of(
    where: str,
    fields: Mapping[str, Any],
    domain: DomainConfig,
    conversation: Sequence[Message],
    without: Sequence[str] = _ANSWERS,
) -> Problem:
    """Return what the answers answer: `conversation`, or where it is empty the row's prompt.

    without: fields that are no metadata, those of the answers. DataError where there is no prompt.
    """
    metadata = {name: value for name, value in fields.items() if name not in without}
    metadata.pop(MESSAGES, None)
    if not conversation:
        field = prompt_field_of(where, fields, domain)
        if not is_conversation(fields[field]):
            question = text_of(where, fields, field, "prompt_field")
            if not question.strip():
                raise DataError(f"field {field!r} is empty", where=where)
            return Problem(question, "", metadata)
        messages = conversation_of(where, fields, field, domain)
        conversation, _ = split_reply(messages)
    metadata[MESSAGES] = list(conversation)
    return Problem(last_question(conversation), "", metadata)
