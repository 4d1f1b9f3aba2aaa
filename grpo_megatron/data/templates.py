"""Prompt templates: `{question}` and `{metadata[key]}`, nothing else.

`str.format` itself would reach attributes, apply format specifications and render an answer into
the prompt; here every field is checked when the template is parsed, before any problem is read.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from grpo_megatron.data.problems import Problem
from grpo_megatron.errors import DataError

_METADATA = re.compile(r"metadata\[([^\[\]]+)\]")
_LEAKS = ("answer", "solution")


@dataclass(frozen=True, slots=True)
class _Piece:
    literal: str
    field: str | None  # "question", a metadata key prefixed with "metadata:", or nothing


class PromptTemplate:
    """A parsed template.

    Example: `PromptTemplate("{metadata[expression]} =").render(problem)` gives `"37 + 48 ="`.

    Raises:
        DataError: Unbalanced braces, an unknown field, or one that would leak the answer.
    """

    def __init__(self, text: str, *, where: str | None = None):
        self.text, self._where = text, where
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise DataError(f"template {text!r}: {error}", where=where,
                            remedy="write literal braces as {{ and }}") from error
        self._pieces = [_Piece(literal, self._checked(name, spec, conversion))
                        for literal, name, spec, conversion in parsed]
        if not any(piece.field for piece in self._pieces):
            raise DataError(f"template {text!r} uses no field: every prompt would be the same",
                            where=where, remedy="use {question} or {metadata[key]}")

    def render(self, problem: Problem) -> str:
        """The prompt text of `problem`. Raises DataError where a metadata key is missing."""
        return "".join(p.literal + self._value(p.field, problem) for p in self._pieces)

    def _checked(self, name: str | None, spec: str | None, conversion: str | None) -> str | None:
        if name is None:
            return None
        match = _METADATA.fullmatch(name)
        key = match.group(1) if match else name
        if any(leak in key.lower() for leak in _LEAKS):
            raise DataError(f"template {self.text!r}: {{{name}}} would put the answer into the "
                            "prompt", where=self._where, remedy="remove the field")
        if spec or conversion or not (match or name == "question"):
            raise DataError(f"template {self.text!r}: {{{name}}} is not supported",
                            where=self._where, remedy="use {question} or {metadata[key]}; "
                            "write literal braces as {{ and }}")
        return f"metadata:{key}" if match else name

    def _value(self, field: str | None, problem: Problem) -> str:
        if field is None:
            return ""
        if field == "question":
            return problem.question
        key = field.removeprefix("metadata:")
        if key not in problem.metadata:
            known = ", ".join(map(str, problem.metadata)) or "none"
            raise DataError(f"template {self.text!r}: a problem has no metadata {key!r}",
                            where=self._where, remedy=f"metadata of that problem: {known}")
        return str(problem.metadata[key])
