"""The lessons that a policy reads, and the operations that change them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.files import write_atomically

_NUMBERED = re.compile(r"E([1-9][0-9]{0,17})")


class Operation(msgspec.Struct, frozen=True):
    """One change: `add` has a text, `delete` an id, `modify` both, `keep` none of them."""

    operation: Literal["add", "modify", "delete", "keep"]
    id: str = ""
    experience: str = ""


@dataclass
class Library:
    """Lessons by id, in the order in which they were learned.

    With the policy's `tokenizer`, no lesson is kept that it cannot write: prompts have lessons as
    `as_text` gives them.

    Attributes:
        refused: Why operations were not carried out, since the last `take_refused`."""

    max_experiences: int
    max_words: int
    tokenizer: TextTokenizer | None = None
    lessons: dict[str, str] = field(default_factory=dict)
    next_number: int = 1
    refused: list[str] = field(default_factory=list)

    def apply(self, operations: Sequence[Operation]) -> int:
        """Carry out operations in their order; what one may not do is refused, and the others are
        done. Returns how many changed something."""
        changed = 0
        for operation in operations:
            problem = self._problem(operation)
            if problem:
                self.refused.append(problem)
                continue
            changed += self._carry_out(operation)
        return changed

    def take_refused(self) -> list[str]:
        """Return why operations were refused, and forget it."""
        refused = self.refused
        self.refused = []
        return refused

    def as_text(self, *, newest: int | None = None) -> str:
        """Return a line a lesson, `[E3] …`; with `newest`, only of the last so many."""
        items = list(self.lessons.items())
        if newest is not None:
            items = items[len(items) - newest :]
        return "\n".join(_line(name, text) for name, text in items)

    def _problem(self, operation: Operation) -> str:
        kind = operation.operation
        if kind in ("modify", "delete") and operation.id not in self.lessons:
            return f"{kind}: there is no {operation.id!r}"
        if kind in ("add", "modify"):
            return self._text_problem(operation)
        return ""

    def _text_problem(self, operation: Operation) -> str:
        kind = operation.operation
        text = one_line(operation.experience)
        if not text:
            return f"{kind}: it has no text"
        num_words = len(text.split())
        if num_words > self.max_words:
            return f"{kind}: {num_words} words, at most {self.max_words} are kept"
        if kind == "add" and len(self.lessons) >= self.max_experiences:
            return f"add: there are {self.max_experiences} already"
        name = operation.id
        if kind == "add":  # its id is ours, whatever it says
            name = f"E{self.next_number}"
        unwritable = self._why_unwritable(name, text)
        if unwritable:
            return f"{kind}: {unwritable}"
        return ""

    def _why_unwritable(self, name: str, text: str) -> str:
        """Why the tokenizer cannot write a lesson; empty: it can, or there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        try:
            self.tokenizer.refuse_unwritable(_line(name, text))
        except DataError as error:
            return error.message
        return ""

    def _carry_out(self, operation: Operation) -> bool:
        text = one_line(operation.experience)
        if operation.operation == "delete":
            del self.lessons[operation.id]
            return True
        if operation.operation == "modify":
            is_new = self.lessons[operation.id] != text
            self.lessons[operation.id] = text
            return is_new
        if operation.operation == "add" and text not in self.lessons.values():
            self.lessons[f"E{self.next_number}"] = text
            self.next_number += 1
            return True
        return False

    def save(self, path: Path, **state: Any) -> None:
        """Write lessons and `state`, whole or not at all."""
        values = {"lessons": self.lessons, "next_number": self.next_number, **state}
        write_atomically(path, json.dumps(values, indent=1, ensure_ascii=False))

    def load(self, path: Path) -> Mapping[str, Any]:
        """Take lessons from a file; returns all that it says. DataError where it is none, or the
        tokenizer cannot write one of its lessons."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            lessons = values["lessons"]
            next_number = values["next_number"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"no lessons can be read: {type(error).__name__} {error}",
                where=str(path),
                remedy="give the experience.json of a run of kind experience",
            ) from error
        is_number = type(next_number) is int and next_number >= 1
        is_whole = isinstance(lessons, dict) and is_number
        if not is_whole or not all(isinstance(text, str) for text in lessons.values()):
            raise DataError(
                "its lessons are no texts by id",
                where=str(path),
                remedy="give the experience.json of a run of kind experience",
            )
        number = max([0, *map(_number_of, lessons)])
        if next_number <= number:
            raise DataError(
                f"lesson 'E{number}' is there, and next_number is {next_number}, so that a new "
                "lesson would take its place",
                where=str(path),
                remedy=f"set next_number to {number + 1} or more",
            )
        for name, text in lessons.items():
            unwritable = self._why_unwritable(name, text)
            if unwritable:
                raise DataError(
                    f"lesson {name!r}: {unwritable}",
                    where=str(path),
                    remedy=f"remove lesson {name!r} from the file, or change its text",
                )
        self.lessons = dict(lessons)
        self.next_number = next_number
        return dict(values)


def _line(name: str, text: str) -> str:
    """Return a lesson as prompts have it."""
    return f"[{name}] {text}"


def _number_of(name: str) -> int:
    """Return the number in the id of a lesson, 0 where the id is no such one."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return 0
    return int(found[1])


def one_line(text: str) -> str:
    """Return the text without line breaks and double spaces: a lesson is one line of a prompt."""
    return " ".join(text.split())
