"""Prompt templates: `{question}` and `{metadata[key]}`, nothing else.

`str.format` itself would reach attributes, apply format specifications and render an answer into
the prompt; here every field is checked when the template is parsed, before any problem is read."""

import re
import string
from collections.abc import Mapping
from typing import Any

from grpo_megatron.errors import DataError

CHAT = "chat"
"""The value of `template` that stands for the tokenizer's own chat template."""


class PromptTemplate:
    """`PromptTemplate("{metadata[a]} =").render("", {"a": "37 + 48"})` gives `"37 + 48 ="`.

    DataError for unbalanced braces, an unknown field, or one that would leak the answer."""

    _field = re.compile(r"question|metadata\[[^\[\]]+\]")
    _fields = "{question} or {metadata[key]}"
    _leaks: tuple[str, ...] = ("answer", "solution")
    _requires_field = True
    _without_field = (
        "uses no field: every prompt would be the same",
        'use {question} or {metadata[key]}, or the chat template: template = "chat"',
    )

    def __init__(self, text: str, *, where: str | None = None):
        self.text = text
        self._where = where
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise self._refused(str(error), "write literal braces as {{ and }}") from error
        self._pieces: list[tuple[str, str]] = []  # (literal text, field after it or "")
        has_field = False
        for literal, name, spec, conversion in pieces:
            field = self._checked(name, f"{spec or ''}{conversion or ''}")
            self._pieces.append((literal, field))
            has_field = has_field or field != ""
        if self._requires_field and not has_field:
            raise self._refused(*self._without_field)

    def render(self, question: str, metadata: Mapping[str, Any]) -> str:
        """Return the prompt of a problem; a key without a value is an empty text. Raises DataError
        where a metadata key is missing."""
        return self._filled(metadata, {"question": question})

    def _filled(self, metadata: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        text = ""
        for literal, field in self._pieces:
            text += literal
            if field in texts:
                text += texts[field]
            elif field:
                key = field.removeprefix("metadata[").removesuffix("]")
                text += self._value(key, metadata)
        return text

    def _value(self, key: str, metadata: Mapping[str, Any]) -> str:
        try:
            value = metadata[key]
        except KeyError:
            raise self._refused(
                f"a problem has no metadata {key!r}",
                "metadata of that problem: " + (", ".join(map(str, metadata)) or "none"),
            ) from None
        if value is None:  # CSV has an empty text there
            return ""
        return str(value)

    def _checked(self, name: str | None, extra: str) -> str:
        if name and any(leak in name.lower() for leak in self._leaks):
            raise self._refused(
                f"{{{name}}} would put the answer into the prompt", "remove the field"
            )
        if name is not None and (extra or not self._field.fullmatch(name)):
            raise self._refused(
                f"{{{name}}} is not supported",
                f"use {self._fields}; write literal braces as {{{{ and }}}}",
            )
        return name or ""

    def _refused(self, reason: str, remedy: str) -> DataError:
        return DataError(f"template {self.text!r}: {reason}", where=self._where, remedy=remedy)


class ResponseTemplate(PromptTemplate):
    """`ResponseTemplate("so</think>{answer}").response("", "85", {})` gives `"so</think>85"`."""

    _field = re.compile(r"question|answer|metadata\[[^\[\]]+\]")
    _fields = "{answer}, {question} or {metadata[key]}"
    _leaks = ()
    _without_field = ("uses no field: every response would be the same", f"use {_fields}")

    def response(self, question: str, answer: str, metadata: Mapping[str, Any]) -> str:
        """Return the response to a problem. Raises DataError where a metadata key is missing."""
        return self._filled(metadata, {"question": question, "answer": answer})


class TurnTemplate(ResponseTemplate):
    """A turn of a demonstrated episode, which may say the same whatever the problem is."""

    _requires_field = False
