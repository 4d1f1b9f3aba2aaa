"""Rows of preferences in the formats in which they are published, and what is wrong with them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.preference_rows import preference_of
from grpo_megatron.data.preferences import (
    load_preferences,
    read_preferences,
    split_by_prompt,
    why_dropped,
)
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.prompts import share, text_hash
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.launch.bindings import refuse_unreadable_problems
from grpo_megatron.types import Prompt
from tests.data.chat_templates import write_tokenizer
from tests.data.preference_files import recipe, write

USER = {"role": "user", "content": "1 + 1?"}
TWO = {"role": "assistant", "content": "2"}
THREE = {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "be brief"}
PLAIN = DomainConfig(name="d", source="file", path="x")
CHAT = PLAIN.model_copy(update={"template": "chat"})


def table(*messages: dict) -> dict:
    """A sequence of messages as older data sets store it: lists by name."""
    return {name: [message[name] for message in messages] for name in ("role", "content")}


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
        {"prompt": [USER], "chosen": table(TWO), "rejected": [THREE]},
        {"prompt": "1 + 1?", "chosen": table(TWO), "rejected": table(THREE)},
        {"chosen": table(USER, TWO), "rejected": [USER, THREE]},
        {"prompt": [USER], "chosen": [USER, TWO], "rejected": [USER, THREE]},
        {"question": "1 + 1?\n", "chosen": [USER, TWO], "rejected": [USER, THREE]},
        {"prompt": "Human: 1 +  1?\nAI:", "chosen": [USER, TWO], "rejected": [USER, THREE]},
        {"prompt": None, "chosen": [USER, TWO], "rejected": [USER, THREE]},
        {"prompt": "", "chosen": [USER, TWO], "rejected": [USER, THREE]},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_formats_of_pairs(fields):
    row = read(fields)
    assert row.problem.question == "1 + 1?"
    assert (row.answers, row.labels) == (("2", "3"), (1.0, 0.0))


def test_conversations_may_be_text_of_json():
    """As CSV has them."""
    row = read({"chosen": json.dumps([USER, TWO]), "rejected": json.dumps([USER, THREE])})
    assert (row.problem.question, row.answers) == ("1 + 1?", ("2", "3"))
    row = read({"prompt": json.dumps([USER]), "chosen": "2", "rejected": json.dumps([THREE])})
    assert row.problem.metadata["messages"] == [USER]
    assert row.answers == ("2", "3")


def test_several_turns_before_the_answers():
    before = [SYSTEM, USER, TWO, USER]
    row = read({"chosen": [*before, TWO], "rejected": [*before, THREE]})
    assert row.problem.metadata["messages"] == before
    prompts = [[USER, TWO, USER], [USER], "be brief", USER["content"]]
    for prompt in prompts:  # what the conversations have, too
        again = read({"prompt": prompt, "chosen": [*before, TWO], "rejected": [*before, THREE]})
        assert again.problem.metadata["messages"] == before


def test_labels_and_pairs_that_become_labels():
    row = read({"prompt": "1 + 1?", "completion": "2", "label": True}, is_paired=False)
    assert (row.answers, row.labels) == (("2",), (1.0,))
    row = read({"prompt": [USER], "completion": [THREE], "label": 0}, is_paired=False)
    assert (row.answers, row.labels) == (("3",), (0.0,))
    row = read({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, is_paired=False)
    assert (row.answers, row.labels) == (("2", "3"), (1.0, 0.0))


@pytest.mark.parametrize("absent", [None, "", " ", []])
def test_pairs_and_labels_in_one_table(absent):
    """Every row has all columns, empty ones of what it is not."""
    columns = dict.fromkeys(("prompt", "chosen", "rejected", "completion", "label"), absent)
    labelled = columns | {"prompt": "1 + 1?", "completion": "2", "label": "true"}
    row = read(labelled, is_paired=False)
    assert (row.answers, row.labels) == (("2",), (1.0,))
    pair = columns | {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    for is_paired in (True, False):
        row = read(pair, is_paired=is_paired)
        assert (row.answers, row.labels) == (("2", "3"), (1.0, 0.0))


def test_empty_answers_of_one_table_are_counted():
    columns = {"prompt": "1 + 1?", "chosen": "", "rejected": "3", "completion": "", "label": ""}
    settings = PreferencesConfig()
    assert why_dropped(read(columns, is_paired=False), settings) == "with an empty answer"
    assert why_dropped(read(columns | {"rejected": ""}), settings) == "with an empty answer"
    labelled = {"prompt": "1 + 1?", "completion": "", "label": True}
    assert why_dropped(read(labelled, is_paired=False), settings) == "with an empty answer"


@pytest.mark.parametrize("rejected", [None, "", "3"])
def test_a_row_with_a_pair_and_a_labelled_completion_is_refused(rejected):
    fields = {"prompt": "x", "chosen": "2", "rejected": rejected, "completion": "4", "label": 0}
    with pytest.raises(DataError, match="a pair and a 'completion' with a label, of which one"):
        read(fields, is_paired=False)


@pytest.mark.parametrize("completion", ["4", {"model": "x"}, [THREE]])
def test_a_completion_beside_a_pair_is_the_rows_own(completion):
    """Where no labelled answer is trained, or it has no label."""
    fields = {"prompt": "x", "chosen": "2", "rejected": "3", "completion": completion}
    for row in (fields, fields | {"label": None}, fields | {"label": " "}):
        assert read(row, is_paired=False).labels == (1.0, 0.0)
    for row in (fields, fields | {"label": True}):
        assert read(row, is_paired=True).answers == ("2", "3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "chosen": None, "completion": None}, "neither 'chosen'"),
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
        ({"chosen": table(), "rejected": [USER, TWO]}, "'chosen' has no message of a user"),
        ({"prompt": "x", "chosen": table(USER), "rejected": [TWO]}, "last message of 'chosen'"),
        (
            {"prompt": [USER, TWO], "chosen": [THREE], "rejected": [TWO | {"content": "4"}]},
            "conversation in 'prompt' ends with a message of the assistant",
        ),
        (
            {"prompt": [USER], "chosen": [USER | {"content": "2 * 3?"}, TWO], "rejected": [TWO]},
            "differ before",
        ),
        (
            {"prompt": "2 * 3?", "chosen": [USER, TWO], "rejected": [USER, THREE]},
            "'prompt' says something else than 'chosen' does",
        ),
        (
            {"prompt": [SYSTEM, USER], "chosen": [USER, TWO], "rejected": [USER, THREE]},
            "'prompt' says something else than 'chosen' does",
        ),
        (
            {"question": "2 * 3?", "chosen": [USER, TWO], "rejected": [USER, THREE]},
            "'question' says something else than 'chosen' does",
        ),
        (
            {"chosen": [SYSTEM, USER | {"content": " "}, TWO], "rejected": [SYSTEM, USER, THREE]},
            "differ before",
        ),
        (
            {"chosen": [USER | {"content": " "}, TWO], "rejected": [USER | {"content": " "}, TWO]},
            "last message of the user is empty",
        ),
        ({"chosen": [USER, TWO], "rejected": [USER, TWO, USER, TWO]}, "differ before"),
        ({"prompt": "x", "completion": "2", "label": True}, "compares two answers"),
        (
            {"prompt": [USER], "chosen": [TWO | {"reasoning_content": "sum"}], "rejected": [THREE]},
            "'chosen' has 'reasoning_content', and its content alone",
        ),
        (
            {"chosen": [USER, TWO], "rejected": [USER, THREE | {"tool_calls": [{"id": "1"}]}]},
            "'rejected' has 'tool_calls'",
        ),
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
        refuse_unreadable_problems(recipe(path))


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


NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=60)
"""Of the questions of a domain, some with several answers."""


def prompts_of(domains: dict[str, list[int]]) -> list[Prompt]:
    found = []
    for name, numbers in domains.items():
        for place, number in enumerate(numbers):
            found.append(Prompt(f"{name}-{place}", name, f"question {number}", (1,), ""))
    return found


def texts(prompts) -> set[str]:
    return {prompt.text for prompt in prompts}


def of_domain(prompts, name: str) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.domain == name]


@settings(max_examples=100, deadline=None)
@given(
    domains=st.lists(NUMBERS, min_size=1, max_size=3),
    num_heldout=st.integers(0, 8),
    num_validation=st.integers(0, 8),
)
def test_prompts_that_domains_share_are_in_one_split(domains, num_heldout, num_validation):
    by_name = {f"d{place}": numbers for place, numbers in enumerate(domains)}
    prompts = prompts_of(by_name)
    try:
        splits = split_by_prompt(prompts, num_heldout=num_heldout, num_validation=num_validation)
    except DataError as error:
        assert "leave none for training" in str(error)
        return
    train = [prompt for members in splits.train.values() for prompt in members]
    assert not texts(splits.heldout) & texts(splits.validation)
    assert not texts(train) & texts([*splits.heldout, *splits.validation])
    everything = [*train, *splits.validation, *splits.heldout]
    assert sorted(p.prompt_id for p in everything) == sorted(p.prompt_id for p in prompts)
    sizes = {name: len(numbers) for name, numbers in by_name.items()}
    for name in by_name:
        assert len(of_domain(splits.heldout, name)) >= share(num_heldout, sizes)[name]
        assert len(of_domain(splits.validation, name)) >= share(num_validation, sizes)[name]


@settings(max_examples=100, deadline=None)
@given(
    domains=st.lists(NUMBERS, min_size=1, max_size=3),
    num_heldout=st.integers(0, 8),
    num_validation=st.integers(0, 8),
)
def test_where_domains_share_no_prompt_each_is_cut_in_the_order_of_hashes(
    domains, num_heldout, num_validation
):
    by_name = {}
    for place, numbers in enumerate(domains):
        by_name[f"d{place}"] = [100 * place + number for number in numbers]
    sizes = {name: len(numbers) for name, numbers in by_name.items()}
    wanted: dict[str, tuple[list[Prompt], list[Prompt], list[Prompt]]] = {}
    for name, numbers in by_name.items():
        members = sorted(
            prompts_of({name: numbers}), key=lambda p: (text_hash(p.text), p.prompt_id)
        )
        first = end_of_prompt(members, share(num_heldout, sizes)[name])
        second = end_of_prompt(members, first + share(num_validation, sizes)[name])
        wanted[name] = members[:first], members[first:second], members[second:]
    try:
        splits = split_by_prompt(
            prompts_of(by_name), num_heldout=num_heldout, num_validation=num_validation
        )
    except DataError:
        assert not all(train for _, _, train in wanted.values())
        return
    for name, (heldout, validation, train) in wanted.items():
        assert of_domain(splits.heldout, name) == heldout
        assert of_domain(splits.validation, name) == validation
        assert list(splits.train[name]) == train


def end_of_prompt(members: list[Prompt], place: int) -> int:
    while 0 < place < len(members) and members[place].text == members[place - 1].text:
        place += 1
    return min(place, len(members))


def test_a_domain_whose_prompts_another_one_holds_out_is_refused():
    prompts = prompts_of({"small": [1], "large": [1, 2, 3]})
    with pytest.raises(DataError, match=r"'small' has 1 preferences.*in another domain\)"):
        split_by_prompt([*prompts[1:], prompts[0]], num_heldout=3, num_validation=0)


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
        refuse_unreadable_problems(config)


def test_a_file_of_equal_answers_only(tmp_path):
    rows = [row | {"rejected": row["chosen"]} for row in pairs(3)]
    with pytest.raises(DataError, match="3 with equal answers"):
        refuse_unreadable_problems(recipe(write(tmp_path, rows)))


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("loss", "num_left"), [("dpo", 4), ("kto", 8)])
def test_answers_are_compared_behind_what_the_prompt_has_of_them(tmp_path, loss, num_left):
    """A thought that the template has closed already is no answer, and makes no difference."""
    rows = [
        {"prompt": question(f"{n} + 1 ="), "chosen": str(n + 1), "rejected": str(n + 2)}
        for n in range(4)
    ]
    thought = "<think>\n\n</think>\n\n"
    rows.append({"prompt": question("7 + 1 ="), "chosen": f"{thought}8", "rejected": "8"})
    rows.append({"prompt": question("8 + 1 ="), "chosen": thought, "rejected": "9"})
    domain = {"name": "sums", "source": "file", "template": "chat"}
    domain["path"] = str(write(tmp_path, rows))
    domain["template_arguments"] = {"enable_thinking": False}
    config = recipe(
        domain["path"],
        domains=[domain],
        rollout={"max_new_tokens": 64, "max_model_len": 512},
        preferences={"loss": loss},
    )
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", "qwen"))
    found = load_preferences(config, tokenizer)
    assert len(found.by_id) == num_left
    assert len(found.dropped) == 2
    assert any("equal answers" in reason for reason in found.dropped)
    assert any("empty answer" in reason for reason in found.dropped)
