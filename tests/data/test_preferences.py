"""Rows of preferences in the formats in which they are published, and what is wrong with them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.preference_rows import preference_of
from grpo_megatron.data.preferences import (
    load_preferences,
    read_preferences,
    refuse_bad_preferences,
)
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError
from tests.data.preference_files import recipe, write

USER = {"role": "user", "content": "1 + 1?"}
TWO = {"role": "assistant", "content": "2"}
THREE = {"role": "assistant", "content": "3"}
PLAIN = DomainConfig(name="d", source="file", path="x")
CHAT = PLAIN.model_copy(update={"template": "chat"})


def read(fields: dict, domain: DomainConfig = CHAT, *, is_paired: bool = True):
    return preference_of("rows:1", fields, domain, is_paired=is_paired)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"question": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [TWO], "rejected": [THREE]},
        {"messages": [USER], "chosen": "2", "rejected": "3"},
        {"messages": [USER, TWO], "prompt": "x", "chosen": "2", "rejected": "3"},
        {"chosen": [USER, TWO], "rejected": [USER, THREE]},
        {"prompt": "1 + 1?", "chosen": [USER, TWO], "rejected": [USER, THREE], "score": 1.5},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_formats_of_pairs(fields):
    row = read(fields)
    assert row.problem.question == "1 + 1?"
    assert (row.answers, row.labels) == (("2", "3"), (1.0, 0.0))


def test_several_turns_before_the_answers():
    before = [{"role": "system", "content": "be brief"}, USER, TWO, USER]
    row = read({"chosen": [*before, TWO], "rejected": [*before, THREE]})
    assert row.problem.metadata["messages"] == before


def test_labels_and_pairs_that_become_labels():
    row = read({"prompt": "1 + 1?", "completion": "2", "label": True}, is_paired=False)
    assert (row.answers, row.labels) == (("2",), (1.0,))
    row = read({"prompt": [USER], "completion": [THREE], "label": 0}, is_paired=False)
    assert (row.answers, row.labels) == (("3",), (0.0,))
    row = read({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, is_paired=False)
    assert (row.answers, row.labels) == (("2", "3"), (1.0, 0.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "rejected": "3"}, "no 'chosen'"),
        ({"prompt": "x", "chosen": "2", "rejected": None}, "no 'rejected'"),
        ({"prompt": "x", "answer": "2"}, "neither 'chosen'"),
        ({"chosen": "2", "rejected": "3"}, "no field"),
        ({"prompt": " ", "chosen": "2", "rejected": "3"}, "is empty"),
        ({"prompt": "x", "chosen": 2, "rejected": "3"}, "'chosen' is int"),
        ({"chosen": TWO, "rejected": THREE}, "'chosen' is one message, expected a list of mess"),
        ({"prompt": "x", "chosen": "2", "rejected": THREE}, "'rejected' is one message"),
        ({"prompt": USER, "chosen": "2", "rejected": "3"}, "'prompt' is one message"),
        ({"chosen": [USER], "rejected": [USER, TWO]}, "last message of 'chosen'"),
        ({"chosen": [USER, TWO], "rejected": [USER, TWO, USER, TWO]}, "differ before"),
        ({"prompt": "x", "completion": "2", "label": True}, "compares two answers"),
    ],
)
def test_refused_rows(fields, message):
    with pytest.raises(DataError, match=message) as error:
        read(fields)
    assert "rows:1" in str(error.value)


@pytest.mark.parametrize("margin", ["big", True, math.nan, -math.inf, "nan", "1e400", 10**400])
def test_refused_margins(margin):
    fields = {"prompt": "x", "chosen": "2", "rejected": "3", "margin": margin}
    with pytest.raises(DataError, match=f"'margin' is {margin!r}, expected a finite") as caught:
        read(fields)
    assert caught.value.where == "rows:1"


def test_a_margin_that_json_has_no_number_for_is_refused_with_its_line(tmp_path):
    path = write(tmp_path, [*pairs(1), {**pairs(1)[0], "margin": math.inf}])
    with pytest.raises(DataError, match=r"rows.jsonl:2"):
        refuse_bad_preferences(recipe(path))


@pytest.mark.parametrize(
    ("label", "number"),
    [("true", 1), ("False", 0), ("TRUE", 1), ("1", 1), ("0", 0), ("1.0", 1), (1.0, 1), (0.0, 0)],
)
def test_labels_as_tables_write_them(label, number):
    row = read({"prompt": "x", "completion": "2", "label": label}, is_paired=False)
    assert row.labels == (number,)


def test_margins_and_labels_of_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected,margin\n1+1,2,3,1.5\n1+2,3,4,\n1+3,4,5,-2\n")
    config = recipe(path)
    rows = read_preferences(config.domains[0], config.preferences)
    assert [row.margin for row in rows] == [1.5, 0.0, -2.0]
    path.write_text("prompt,completion,label\n1+1,2,True\n1+2,4,false\n")
    config = recipe(path, preferences={"loss": "kto"})
    rows = read_preferences(config.domains[0], config.preferences)
    assert [row.labels for row in rows] == [(1.0,), (0.0,)]


@pytest.mark.parametrize("label", ["yes", "", None, 2, 0.5, math.nan, "0.5", [1]])
def test_refused_labels(label):
    with pytest.raises(DataError, match="expected true or false"):
        read({"prompt": "x", "completion": "2", "label": label}, is_paired=False)


def test_conversations_need_the_chat_template():
    with pytest.raises(DataError, match="no template of one question"):
        read({"chosen": [USER, TWO], "rejected": [USER, THREE]}, PLAIN)


@pytest.mark.parametrize("key", ["domain_field", "split"])
def test_arguments_are_texts(key):
    domain = PLAIN.model_copy(update={"arguments": {key: ["train"]}})
    with pytest.raises(DataError, match="expected a text that is not empty") as caught:
        list(read_preferences(domain, PreferencesConfig()))
    assert caught.value.where == f"[[domains]] d, arguments.{key}"


# --- whole files


@pytest.fixture(scope="module")
def tokenizer():
    with tokenizer_directory(recipe("x").model) as directory:
        return load_tokenizer(directory)


def pairs(count: int) -> list[dict]:
    return [
        {"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(count)
    ]


def test_what_is_left_out_is_counted(tmp_path, tokenizer):
    rows = [
        *pairs(6),
        {"prompt": "7 + 1 =", "chosen": "8", "rejected": "8"},
        {"prompt": "8 + 1 =", "chosen": " ", "rejected": "8"},
        {"prompt": "9 + 1 =", "chosen": "1" * 20, "rejected": "8"},
        pairs(1)[0],
    ]
    found = load_preferences(recipe(write(tmp_path, rows)), tokenizer)
    assert len(found.by_id) == 6
    told = "; ".join(found.dropped)
    for reason in ("1 with equal answers", "1 with an empty answer", "1 longer than", "1 that"):
        assert reason in told
    [one] = [one for one in found.by_id.values() if one.prompt.text == "0 + 1 ="]
    assert one.answers[0].text == "1" and one.answers[0].token_ids[-1] == tokenizer.eos_token_id


def test_equal_prompts_are_in_one_split(tmp_path, tokenizer):
    rows = [row | {"rejected": str(wrong)} for row in pairs(8) for wrong in (50, 60, 70)]
    found = load_preferences(recipe(write(tmp_path, rows)), tokenizer)
    assert len(found.by_id) == 24
    heldout = {prompt.text for prompt in found.splits.heldout}
    trained = {prompt.text for prompt in found.splits.train["sums"]}
    assert not heldout & trained
    assert len(found.splits.heldout) == 3  # all pairs of one prompt, for two that were asked for


def test_labelled_answers_have_one_to_another_prompt(tmp_path, tokenizer):
    config = recipe(write(tmp_path, pairs(5)), preferences={"loss": "kto"})
    found = load_preferences(config, tokenizer)
    assert len(found.by_id) == 10
    for one in found.by_id.values():
        assert one.labels[0] in (0.0, 1.0) and math.isnan(one.labels[1])
        right = str(int(one.prompt.text.split()[0]) + 1)
        assert one.answers[1].text not in (right, str(int(right) + 1)) or right != "x"
    again = load_preferences(config, tokenizer)
    assert list(again.by_id) == list(found.by_id)
    assert all(
        np.array_equal(one.answers[1].token_ids, again.by_id[name].answers[1].token_ids)
        for name, one in found.by_id.items()
    )


def test_a_bad_row_far_down_is_found_before_anything_starts(tmp_path):
    config = recipe(write(tmp_path, [*pairs(200), {"prompt": "x", "chosen": "1"}]))
    with pytest.raises(DataError, match=r"rows.jsonl:201"):
        refuse_bad_preferences(config)


def test_a_file_of_equal_answers_only(tmp_path):
    rows = [row | {"rejected": row["chosen"]} for row in pairs(3)]
    with pytest.raises(DataError, match="3 with equal answers"):
        refuse_bad_preferences(recipe(write(tmp_path, rows)))
