"""Which operations change the lessons, and what is kept of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.controller.experience.library import Library, Operation
from grpo_megatron.errors import DataError
from tests.controller.character_texts import characters


def add(text: str) -> Operation:
    return Operation("add", experience=text)


def test_lessons_are_added_changed_and_deleted():
    library = Library(8, 8)
    assert library.apply([add("check  the\nsign"), add("draw it"), add("read twice")]) == 3
    changed = [
        Operation("modify", "E2", "draw it first"),
        Operation("delete", "E1"),
        Operation("keep", "E3"),
    ]
    assert library.apply(changed) == 2
    assert library.lessons == {"E2": "draw it first", "E3": "read twice"}
    assert library.apply([add("new")]) == 1
    assert library.as_text() == "[E2] draw it first\n[E3] read twice\n[E4] new"
    assert library.as_text(newest=1) == "[E4] new"
    assert library.take_refused() == []


def test_equal_lessons_are_kept_once_and_are_no_change():
    library = Library(8, 8)
    assert library.apply([add("a"), add(" a "), Operation("modify", "E1", "a")]) == 1
    assert list(library.lessons.values()) == ["a"]


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (Operation("modify", "E9", "x"), "there is no 'E9'"),
        (Operation("delete", ""), "there is no ''"),
        (Operation("modify", "E1", " \n"), "it has no text"),
        (add(""), "it has no text"),
        (add("one two three four"), "4 words, at most 3"),
        (add("third"), "there are 2 already"),
    ],
)
def test_what_is_refused_changes_nothing_and_is_told_once(operation, reason):
    library = Library(2, 3)
    library.apply([add("first"), add("second")])
    assert library.apply([operation]) == 0
    assert list(library.lessons.values()) == ["first", "second"]
    [told] = library.take_refused()
    assert reason in told
    assert library.take_refused() == []


def test_a_lesson_that_the_tokenizer_cannot_write_is_refused():
    library = Library(8, 8, characters())
    given = [add("mail a@b"), add("first"), Operation("modify", "E1", "@")]
    given.append(Operation("add", "@", "second"))
    assert library.apply(given) == 2
    assert library.lessons == {"E1": "first", "E2": "second"}
    assert library.take_refused() == ["add: no token for '@'", "modify: no token for '@'"]


def test_a_file_with_a_lesson_that_the_tokenizer_cannot_write_is_refused(tmp_path):
    library = Library(8, 8)
    library.apply([add("first"), add("mail a@b")])
    library.save(tmp_path / "experience.json")
    with pytest.raises(DataError, match="lesson 'E2': no token for '@'") as error:
        Library(8, 8, characters()).load(tmp_path / "experience.json")
    assert error.value.where == str(tmp_path / "experience.json")
    assert "remove lesson 'E2'" in error.value.remedy
    Library(8, 8).load(tmp_path / "experience.json")


def test_what_is_deleted_makes_room_and_no_id_comes_again():
    library = Library(1, 3)
    library.apply([add("first"), Operation("delete", "E1"), add("second")])
    assert library.lessons == {"E2": "second"}


operations = st.builds(
    Operation,
    st.sampled_from(["add", "modify", "delete", "keep"]),
    st.sampled_from(["", "E1", "E2", "E3", "E4"]),
    st.text(max_size=12),
)


@given(st.lists(operations, max_size=20))
def test_there_are_never_too_many_or_too_long_ones(given_operations):
    library = Library(3, 2)
    library.apply(given_operations)
    assert len(library.lessons) <= 3
    for text in library.lessons.values():
        assert text == " ".join(text.split())
        assert 1 <= len(text.split()) <= 2


def test_lessons_are_read_as_they_were_written(tmp_path):
    library = Library(8, 8)
    library.apply([add("snow: 雪"), add('"quoted" {braces}'), Operation("delete", "E1")])
    library.save(tmp_path / "experience.json", step=3)
    other = Library(8, 8)
    assert other.load(tmp_path / "experience.json")["step"] == 3
    assert other.lessons == library.lessons
    other.apply([add("next")])
    assert list(other.lessons) == ["E2", "E3"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        json.dumps({"lessons": ["a"], "next_number": 1}),
        json.dumps({"lessons": {"E1": 3}, "next_number": 2}),
        json.dumps({"lessons": {}, "next_number": "2"}),
        json.dumps({"lessons": {}, "next_number": True}),
        json.dumps({"lessons": {}, "next_number": 0}),
    ],
)
def test_files_without_lessons_are_refused(tmp_path, text):
    path = tmp_path / "experience.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=r"lessons.*experience\.json"):
        Library(8, 8).load(path)


@pytest.mark.parametrize("next_number", [1, 3])
def test_a_next_number_that_would_take_the_place_of_a_lesson_is_refused(tmp_path, next_number):
    path = tmp_path / "experience.json"
    lessons = {"E3": "keep me", "E1": "and me", "E03": "of another kind", "tip": "too"}
    path.write_text(json.dumps({"lessons": lessons, "next_number": next_number}))
    with pytest.raises(DataError, match="lesson 'E3' is there, and next_number is") as error:
        Library(8, 8).load(path)
    assert error.value.remedy == "set next_number to 4 or more"
    path.write_text(json.dumps({"lessons": lessons, "next_number": 4}))
    library = Library(8, 8)
    library.load(path)
    library.apply([add("next")])
    assert library.lessons == {**lessons, "E4": "next"}
