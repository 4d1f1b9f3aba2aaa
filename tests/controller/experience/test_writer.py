"""What the writer of lessons is asked, and what is read of its replies."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.controller.experience.library import Library, Operation
from grpo_megatron.controller.experience.writer import (
    Attempt,
    GradedProblem,
    LessonWriter,
    read_operations,
)
from grpo_megatron.errors import EngineError

PROBLEMS = [
    GradedProblem("1 + {x}?", "right-1", [Attempt("good {text}", 1.0), Attempt("bad", 0.0)]),
    GradedProblem("second", "right-2", [Attempt("fair", 0.5), Attempt("worse", 0.25)]),
]
ADD = [{"operation": "add", "experience": "look"}]
ADDS = json.dumps(ADD)
LOOK = Operation("add", experience="look")


class Model:
    """Replies by the kind of question, and keeps what it was asked."""

    def __init__(self, *, group=ADDS, merge="[]", summary="a summary"):
        self.replies = {"review one attempt": summary, "Several attempts": group}
        self.replies["Reviewers of several"] = merge
        self.asked: list[str] = []

    async def __call__(self, texts):
        self.asked += texts
        return [self._reply(text) for text in texts]

    def _reply(self, text):
        for beginning, reply in self.replies.items():
            if beginning in text:
                if isinstance(reply, list):
                    return reply.pop(0)
                return reply
        raise AssertionError(text)

    def with_(self, word: str) -> list[str]:
        return [text for text in self.asked if word in text]


def operations_of(model, problems=PROBLEMS, library=None, **settings):
    writer = LessonWriter(ExperienceConfig(**settings), model)
    found = asyncio.run(writer.operations(problems, library or Library(8, 8)))
    return found, writer.take_counts()


def test_attempts_are_summarised_groups_compared_and_groups_merged():
    model = Model(merge=json.dumps([*ADD, {"operation": "delete", "id": "E1"}]))
    library = Library(8, 8)
    library.apply([Operation("add", experience="known lesson")])
    found, counts = operations_of(model, library=library)
    assert found == [Operation("add", experience="look"), Operation("delete", "E1")]
    assert (counts.requests, counts.failed, counts.unreadable) == (4 + 2 + 1, 0, 0)
    summaries = model.with_("review one attempt")
    assert len(summaries) == 4
    assert "1 + {x}?" in summaries[0] and "good {text}" in summaries[0] and "1.00" in summaries[0]
    [first, second] = model.with_("Several attempts")
    assert "- grade 1.00: a summary\n- grade 0.00: a summary" in first
    assert "[E1] known lesson" in first and "right-1" in first and "right-2" in second
    [merge] = model.with_("Reviewers of several")
    assert merge.count('"experience":"look"') == 2 and "[E1] known lesson" in merge
    assert '{"operation": "add"' in merge, "braces of the text itself are no places"


def test_one_group_that_teaches_needs_no_merge():
    model = Model(group=["nothing []", "so: " + ADDS])
    found, _ = operations_of(model)
    assert found == [LOOK]
    assert model.with_("Reviewers of several") == []


def test_answers_can_be_kept_from_the_writer():
    model = Model()
    operations_of(model, show_answer=False)
    assert model.with_("right-1") == []


def test_unreadable_replies_are_asked_again_and_counted():
    model = Model(group=["no list", ADDS, "[1, 2]"])
    found, counts = operations_of(model)
    assert found == [LOOK]
    assert counts.unreadable == 1
    _, counts = operations_of(Model(group="no list"), writer_attempts=3)
    assert (counts.unreadable, counts.requests) == (2, 4 + 2 * 3)


def test_a_thought_is_no_part_of_a_summary():
    model = Model(summary="<think>[long]</think>\nshort")
    operations_of(model)
    [text, *_] = model.with_("Several attempts")
    assert "- grade 1.00: short\n" in text


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ("long\n</think>\nshort", "short"),
        ("<think>it never ends", "(no summary)"),
        (
            "The attempt opened <think> and never closed it; it is wrong.",
            "The attempt opened <think> and never closed it; it is wrong.",
        ),
        (
            "<think>a</think>It wrote <think>x</think> twice.",
            "It wrote <think>x</think> twice.",
        ),
        ("It put <think>x</think> last.", "It put <think>x</think> last."),
    ],
)
def test_a_summary_may_speak_of_thoughts(reply, summary):
    model = Model(summary=reply)
    operations_of(model)
    [text, *_] = model.with_("Several attempts")
    assert f"- grade 1.00: {summary}\n" in text


def test_missing_replies_are_counted_and_where_there_are_none_the_run_ends():
    found, counts = operations_of(Model(summary=None))
    assert (counts.failed, counts.requests) == (4, 7) and found == []
    with pytest.raises(EngineError, match=r"replied to none of 8 requests"):
        operations_of(Model(summary=None, group=None), writer_attempts=2)


def test_without_problems_nobody_is_asked():
    model = Model()
    found, counts = operations_of(model, problems=[])
    assert found == [] and counts.requests == 0 and model.asked == []


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", None),
        ("see [E1] and [E2]", None),
        ("[1, 2]", None),
        ('{"operation": "add", "experience": "x"}', None),
        ('[{"operation": "drop", "id": "E1"}]', None),
        ("nothing to learn: []", []),
        ('```json\n[{"operation": "delete", "id": "E1"}]\n```', [Operation("delete", "E1")]),
        (
            'As [E1] says: [{"operation": "add", "experience": "return [] if [x] is empty"}]',
            [Operation("add", experience="return [] if [x] is empty")],
        ),
        (
            'draft [{"operation": "keep"}], final [{"operation": "delete", "id": "E2"}] [E2]',
            [Operation("delete", "E2")],
        ),
        ('<think>draft [{"operation": "delete", "id": "E1"}]</think> I would do nothing.', None),
        ('draft [{"operation": "delete", "id": "E1"}]\n</think>\n\n[]', []),
        ('<think>draft [{"operation": "delete", "id": "E1"}] but', None),
        ("<think>[1]</think>\n" + ADDS, [LOOK]),
        ('draft [{"operation": "delete", "id": "E1"}]\n</think>\n\nNothing.', None),
        (
            '[{"operation": "add", "experience": "Close with </think> before the answer."}]',
            [Operation("add", experience="Close with </think> before the answer.")],
        ),
        (
            '<think>a</think>[{"operation": "add", "experience": "Put steps in <think> tags."}]',
            [Operation("add", experience="Put steps in <think> tags.")],
        ),
        ("Good ones use <think> tags.\n" + ADDS, [LOOK]),
        (ADDS + "\nGood ones use <think>…</think>.", [LOOK]),
        ("<think>a</think>" + ADDS + "\nEnd with </think>.", [LOOK]),
        (ADDS + "\nDeletions: []", [LOOK]),
        (ADDS + "\nOn second thought:\n```json\n[]\n```", []),
        ("[" * 5000, None),
        ('[{"operation": "add", "experience": "half a pair: \\ud83d"}]', None),
        (ADDS + ' [{"operation": "delete", "id": "\\ud83d"}]', [LOOK]),
    ],
)
def test_the_last_list_of_operations_counts(reply, expected):
    assert read_operations(reply) == expected


def test_lessons_that_are_no_unicode_are_asked_again_and_never_merged():
    half = '[{"operation": "add", "experience": "half a pair: \\ud83d"}]'
    found, counts = operations_of(Model(group=[ADDS, half, half]))
    assert found == [LOOK]
    assert counts.unreadable == 1


def test_at_most_three_operations_of_a_group_are_taken():
    many = json.dumps([{"operation": "add", "experience": f"x{number}"} for number in range(20)])
    found, counts = operations_of(Model(group=[many, "[]"]))
    assert [operation.experience for operation in found] == ["x0", "x1", "x2"]
    assert counts.surplus == 17
    model = Model(group=[many, ADDS], merge=many)
    found, counts = operations_of(model)
    [merge] = model.with_("Reviewers of several")
    assert '"experience":"x2"' in merge and "x3" not in merge
    assert (len(found), counts.surplus) == (20, 17), "the merge may propose as many as it likes"


def test_operations_that_keep_a_lesson_take_no_place_of_another():
    kept = [{"operation": "keep", "id": f"E{number}"} for number in range(3)]
    adds = [{"operation": "add", "experience": f"x{number}"} for number in range(4)]
    found, counts = operations_of(Model(group=[json.dumps(kept + adds), json.dumps(kept)]))
    assert [operation.experience for operation in found] == ["x0", "x1", "x2"]
    assert counts.surplus == 1


@given(st.text(alphabet='[]{}",:E1 ', max_size=60))
def test_any_reply_is_read_or_not(reply):
    found = read_operations(reply)
    assert found is None or isinstance(found, list)
