"""A model that compares graded answers and writes lessons (Training-Free GRPO, arXiv:2510.08191,
section 3.2): a summary of each answer, operations of each group, one merge of a step's groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.config.layouts import fill
from grpo_megatron.controller.experience.library import Library, Operation
from grpo_megatron.errors import EngineError

_FOLDER = Path(__file__).parent
MAX_PROPOSALS = 3
"""Operations of a group that are taken, as many as `group.txt` asks for."""
_START_OF_THOUGHT = "<think>"
_END_OF_THOUGHT = "</think>"


class AskModel(Protocol):
    """Asks a model."""

    async def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """Return the reply to each text; None: there was none, or the text was too long."""


@dataclass(frozen=True)
class Attempt:
    """An answer of the policy to a problem."""

    text: str
    reward: float


@dataclass(frozen=True)
class GradedProblem:
    """A problem with answers whose rewards differ."""

    question: str
    answer: str
    attempts: Sequence[Attempt]


@dataclass
class WriterCounts:
    """What a step's writing came to."""

    requests: int = 0
    failed: int = 0  # no reply, or a text that was too long
    unreadable: int = 0  # groups, or merges, without a list of operations
    surplus: int = 0  # operations that a group proposed beyond `MAX_PROPOSALS`


class LessonWriter:
    """Writes lessons with a model that `ask` reaches.

    Attributes:
        counts: Since `take_counts` was called."""

    def __init__(self, settings: ExperienceConfig, ask: AskModel):
        self.counts = WriterCounts()
        self._settings = settings
        self._ask = ask
        self._summary = _text("summary")
        self._group = _text("group")
        self._merge = _text("merge")

    def take_counts(self) -> WriterCounts:
        """Return what was counted; it begins anew."""
        counts = self.counts
        self.counts = WriterCounts()
        return counts

    async def operations(
        self, problems: Sequence[GradedProblem], library: Library
    ) -> list[Operation]:
        """Return what the answers to a step's problems teach; the library is not changed.

        Raises EngineError: the model replied to nothing."""
        if not problems:
            return []
        summaries = await self._summaries(problems)
        texts = []
        for problem, of_problem in zip(problems, summaries, strict=True):
            texts.append(self._group_text(problem, of_problem, library))
        teaching = []
        for operations in await self._operations(texts):
            changes = [operation for operation in operations if operation.operation != "keep"]
            self.counts.surplus += max(len(changes) - MAX_PROPOSALS, 0)
            if changes:
                teaching.append(changes[:MAX_PROPOSALS])
        if self.counts.failed == self.counts.requests:
            raise EngineError(
                f"the writer of lessons replied to none of {self.counts.requests} requests",
                where="experience",
                remedy="is its server up, and are problems and answers shorter than its context?",
            )
        if not teaching:
            return []
        if len(teaching) == 1:
            return teaching[0]
        [merged] = await self._operations([self._merge_text(teaching, library)])
        return merged

    async def _summaries(self, problems: Sequence[GradedProblem]) -> list[list[str]]:
        """Have every attempt at every problem summarised; returns the summaries by problem."""
        texts = []
        for problem in problems:
            for attempt in problem.attempts:
                values = self._problem_values(problem) | {
                    "grade": f"{attempt.reward:.2f}",
                    "attempt": attempt.text,
                }
                texts.append(fill(self._summary, values))
        replies = iter(await self._replies(texts))
        summaries = []
        for problem in problems:
            of_problem = []
            for _ in problem.attempts:
                of_problem.append(_without_thought(next(replies) or "") or "(no summary)")
            summaries.append(of_problem)
        return summaries

    def _group_text(
        self, problem: GradedProblem, summaries: Sequence[str], library: Library
    ) -> str:
        lines = []
        for attempt, summary in zip(problem.attempts, summaries, strict=True):
            lines.append(f"- grade {attempt.reward:.2f}: {summary}")
        values = self._problem_values(problem) | {
            "attempts": "\n".join(lines),
            "experiences": library.as_text() or "(none)",
            "max_words": str(self._settings.max_words),
        }
        return fill(self._group, values)

    def _merge_text(self, proposed: Sequence[Sequence[Operation]], library: Library) -> str:
        lines = []
        for operations in proposed:
            for operation in operations:
                lines.append(msgspec.json.encode(operation).decode())
        values = {
            "operations": "\n".join(lines),
            "experiences": library.as_text() or "(none)",
            "max_experiences": str(self._settings.max_experiences),
            "max_words": str(self._settings.max_words),
        }
        return fill(self._merge, values)

    def _problem_values(self, problem: GradedProblem) -> dict[str, str]:
        answer = ""
        if self._settings.show_answer and problem.answer:
            answer = f"\nThe right answer:\n{problem.answer}\n"
        return {"question": problem.question, "answer": answer}

    async def _operations(self, texts: Sequence[str]) -> list[list[Operation]]:
        """Return the operations of each reply; a text without readable ones is asked again."""
        found: dict[int, list[Operation]] = {}
        open_texts = list(range(len(texts)))
        for _ in range(self._settings.writer_attempts):
            if not open_texts:
                break
            replies = await self._replies([texts[index] for index in open_texts])
            for index, reply in zip(open_texts, replies, strict=True):
                operations = read_operations(reply or "")
                if operations is not None:
                    found[index] = operations
            open_texts = [index for index in open_texts if index not in found]
        self.counts.unreadable += len(open_texts)
        return [found.get(index, []) for index in range(len(texts))]

    async def _replies(self, texts: Sequence[str]) -> list[str | None]:
        replies = await self._ask(texts)
        self.counts.requests += len(texts)
        self.counts.failed += sum(reply is None for reply in replies)
        return replies


def read_operations(reply: str) -> list[Operation] | None:
    """Return the last JSON list of operations in a reply, thoughts aside; None where there is none.
    Lists inside of one, or inside of its texts, are not looked at, nor are tags of a thought there.
    An empty list behind another one counts only on a line of its own: elsewhere it says that one
    kind of operation is not wanted."""
    text = _behind_opened_thought(reply)
    may_end_thought = text == reply  # of one that the template opened, the reply has the end alone
    decoder = json.JSONDecoder()
    found = None
    behind_last = 0
    place = text.find("[")
    while place >= 0:
        end = place + 1
        try:
            values, behind = decoder.raw_decode(text, place)
            operations = msgspec.convert(values, list[Operation])
            for operation in operations:
                _refuse_half_characters(operation)
            end = behind
            if may_end_thought and _ends_thought(text[behind_last:place]):
                found = None
            if operations or not found or _is_line(text, place, behind):
                found = operations
            behind_last = behind
        except (ValueError, RecursionError, msgspec.ValidationError):
            pass  # other brackets, such as those of an id
        place = text.find("[", end)
    if may_end_thought and _ends_thought(text[behind_last:]):
        return None
    return found


def _refuse_half_characters(operation: Operation) -> None:
    """Raise ValueError where a text has half of a surrogate pair, which JSON can write and no
    tokenizer or request can."""
    for text in (operation.id, operation.experience):
        text.encode()


def _is_line(text: str, start: int, end: int) -> bool:
    """Whether nothing else stands on the lines of this part of a text."""
    before = text[:start].rpartition("\n")[2]
    behind = text[end:].partition("\n")[0]
    return not before.strip() and not behind.strip()


def _without_thought(reply: str) -> str:
    """Return what stands behind the thought with which a reply begins. What it says about the tags
    of thoughts later on is its own."""
    text = _behind_opened_thought(reply)
    if text == reply and _ends_thought(reply):
        text = reply.partition(_END_OF_THOUGHT)[2]
    return text.strip()


def _behind_opened_thought(reply: str) -> str:
    """Return what stands behind the thought that a reply opens, nothing where it does not end; all
    of a reply that opens none."""
    if reply.lstrip().startswith(_START_OF_THOUGHT):
        return reply.partition(_END_OF_THOUGHT)[2]
    return reply


def _ends_thought(text: str) -> bool:
    """Whether a text ends a thought that it does not begin."""
    before, end, _ = text.partition(_END_OF_THOUGHT)
    return bool(end) and _START_OF_THOUGHT not in before


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
