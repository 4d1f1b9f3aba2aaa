"""Answers whose steps have labels: rows, what is wrong with them, and their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.preferences import load_preferences, why_dropped
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.step_rows import StepRow, id_of_step_token, marked_answer, step_row_of
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.launch.bindings import refuse_unreadable_problems
from grpo_megatron.rewards.step_rewards import steps_of
from grpo_megatron.types import Problem, Prompt, require_sound
from tests.data.preference_files import recipe, write

PLAIN = DomainConfig(name="d", source="file", path="x")
CHAT = PLAIN.model_copy(update={"template": "chat"})
STEPWISE = PreferencesConfig(loss="stepwise", step_token=".")
NO_PROMPT = Prompt("", "d", "", (), "")
USER = {"role": "user", "content": "1 + 1?"}


def read(fields: dict, domain: DomainConfig = PLAIN) -> StepRow:
    return step_row_of("rows:1", fields, domain)


@pytest.mark.parametrize(
    ("domain", "prompt"),
    [
        (PLAIN, {"prompt": "1 + 1?"}),
        (PLAIN, {"question": "1 + 1?"}),
        (CHAT, {"prompt": [USER]}),
        (CHAT, {"messages": [USER]}),
    ],
)
def test_formats(domain, prompt):
    row = read({**prompt, "completions": ["a", "b", "c"], "labels": [True, 0.25, 0]}, domain)
    assert row.problem.question == "1 + 1?"
    assert (row.steps, row.labels) == (("a", "b", "c"), (1.0, 0.25, 0.0))
    assert "labels" not in row.problem.metadata


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "labels": [1]}, "no 'completions'"),
        ({"prompt": "x", "completions": ["a"]}, "no 'labels'"),
        ({"prompt": "x", "completions": "a", "labels": [1]}, "'completions' is str"),
        ({"prompt": "x", "completions": ["a"], "labels": True}, "'labels' is bool"),
        ({"prompt": "x", "completions": ["a", 2], "labels": [1, 1]}, "step 1 of 'completions'"),
        ({"prompt": "x", "completions": ["a", "b"], "labels": [1]}, "2 'completions' and 1"),
        ({"prompt": "x", "completions": ["a"], "labels": [1.5]}, "label 0 of 'labels' is 1.5"),
        ({"prompt": "x", "completions": ["a"], "labels": ["+"]}, "label 0 of 'labels' is '\\+'"),
        ({"prompt": "x", "completions": ["a"], "labels": [float("nan")]}, "is nan"),
        ({"completions": ["a"], "labels": [1]}, "no field"),
    ],
)
def test_refused_rows(fields, message):
    with pytest.raises(DataError, match=message) as error:
        read(fields)
    assert "rows:1" in str(error.value)


def test_a_conversation_may_end_with_the_steps_but_with_no_other_answer():
    fields = {"completions": ["a b", "c"], "labels": [1, 0]}
    whole = {"role": "assistant", "content": "a b\n\nc\n"}
    row = read({"messages": [USER, whole], **fields}, CHAT)
    assert row.problem.metadata["messages"] == [USER]
    other = whole | {"content": "d"}
    with pytest.raises(DataError, match="'messages' ends with a message of the assistant"):
        read({"messages": [USER, other], **fields}, CHAT)


# --- tokens


@pytest.fixture(scope="module")
def tokenizer():
    with tokenizer_directory(recipe("x").model) as directory:
        return load_tokenizer(directory)


def test_a_step_is_read_at_its_mark(tokenizer):
    row = StepRow(Problem("", "", {}), (" 12", "34 ", "5"), (1.0, 0.0, 0.5))
    answer = marked_answer(row, NO_PROMPT, tokenizer, ".")
    assert tokenizer.decode(answer.token_ids) == "12.34.5.."
    assert [turn.reward for turn in answer.turns] == [1.0, 0.0, 0.5]
    before = [int(answer.token_ids[turn.start - 1]) for turn in answer.turns]
    assert before == [id_of_step_token(tokenizer, ".")] * 3
    require_sound(answer, "x")


def test_the_text_is_that_of_a_served_model(tokenizer):
    """`process_reward_model` sends what `steps_of` finds in a completion."""
    completion = " 1 + 2\n\n3\n\n\n\n 4 * 5 "
    sent = "".join(step.text + "." for step in steps_of(completion, "\n\n"))
    row = StepRow(Problem("", "", {}), (" 1 + 2", "3", " 4 * 5 "), (1, 1, 1))
    assert marked_answer(row, NO_PROMPT, tokenizer, ".").text == sent


def joining_tokenizer() -> TextTokenizer:
    """Bytes, and `a.` as one token."""
    letters = {letter: number for number, letter in enumerate(ByteLevel.alphabet())}
    backend = Tokenizer(BPE({**letters, "a.": len(letters)}, [("a", ".")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return TextTokenizer(backend, 0, (), None)


def test_a_mark_that_the_tokenizer_joins_with_a_step():
    row = StepRow(Problem("", "", {}), ("b", "a"), (1.0, 1.0))
    why = marked_answer(row, NO_PROMPT, joining_tokenizer(), ".")
    assert why == "with steps that the tokenizer joins with '.' or the prompt"
    alone = StepRow(Problem("", "", {}), ("b", "ab"), (1.0, 1.0))
    assert marked_answer(alone, NO_PROMPT, joining_tokenizer(), ".").text == "b.ab."


def test_a_mark_that_a_step_has_already_is_the_mark(tokenizer):
    """Math-Shepherd's steps end with it."""
    row = StepRow(Problem("", "", {}), ("12.", " 34. "), (1.0, 0.0))
    assert why_dropped(row, STEPWISE) == ""
    bare = StepRow(Problem("", "", {}), ("12", "34"), (1.0, 0.0))
    marked = marked_answer(row, NO_PROMPT, tokenizer, ".")
    expected = marked_answer(bare, NO_PROMPT, tokenizer, ".")
    assert marked.text == expected.text == "12.34."
    np.testing.assert_array_equal(marked.token_ids, expected.token_ids)


@pytest.mark.parametrize("step", ["2.8", ".8", "2..", "2 . 8 ."])
def test_a_step_with_the_mark_inside_is_left_out(step):
    """Without the mark it would be another text under the label of this one."""
    row = StepRow(Problem("", "", {}), ("12", step), (1.0, 0.0))
    assert why_dropped(row, STEPWISE) == "with the step token '.' inside of a step"


@pytest.mark.parametrize("step", ["", " ", ".", " . "])
def test_a_step_of_a_mark_alone_is_empty(step):
    row = StepRow(Problem("", "", {}), ("12", step), (1.0, 0.0))
    assert why_dropped(row, STEPWISE) == "with an empty step"


def test_a_prompt_with_the_mark_is_left_out(tokenizer):
    """A server would score it as a step."""
    row = StepRow(Problem("", "", {}), ("12",), (1.0,))
    prompt = Prompt("", "d", "1.5 =", tuple(tokenizer.encode("1.5 =")), "")
    why = marked_answer(row, prompt, tokenizer, ".")
    assert why == "with the step token '.' in the prompt"


@pytest.mark.parametrize(
    ("mark", "message"), [("==", "'==' is 2 tokens of"), ("<extra_0>", "cannot be written with")]
)
def test_a_mark_that_is_no_token(tokenizer, mark, message):
    with pytest.raises(DataError, match=message) as error:
        id_of_step_token(tokenizer, mark)
    assert "preferences.step_token" in str(error.value)


# --- whole files


def steps_recipe(path) -> RunConfig:
    settings = {"loss": "stepwise", "step_token": "."}
    return recipe(path, kind="reward_model", preferences=settings)


def answers(count: int) -> list[dict]:
    return [
        {"prompt": f"{n} + 1 =", "completions": [str(n), str(n + 1)], "labels": [0, n % 2]}
        for n in range(count)
    ]


def test_what_is_left_out_is_counted(tmp_path, tokenizer):
    rows = [
        *answers(6),
        answers(1)[0],
        {"prompt": "1 + 1 =", "completions": ["3", " "], "labels": [1, 1]},
        {"prompt": "1 + 1 =", "completions": [], "labels": []},
        {"prompt": "1 + 1 =", "completions": ["1" * 9], "labels": [1]},
        {"prompt": "1 + 1 =", "completions": ["2.8", "3"], "labels": [1, 0]},
        {"prompt": "1 + 1 =", "completions": ["3", "2.8"], "labels": [1, 0]},
        {"prompt": "1.5 + 1 =", "completions": ["3"], "labels": [1]},
    ]
    found = load_preferences(steps_recipe(write(tmp_path, rows)), tokenizer)
    assert sorted(found.dropped.values()) == [1, 1, 1, 1, 1, 2]
    [inside] = [text for text in found.dropped if "inside of a step" in text]
    assert inside == "domain 'sums': 2 with the step token '.' inside of a step"
    assert {len(one.answers) for one in found.by_id.values()} == {1}
    assert len(found.by_id) == 6
    longest = {"prompt": "1 + 1 =", "completions": ["1" * 7], "labels": [1]}  # 7 + 8 tokens
    whole = load_preferences(steps_recipe(write(tmp_path, [*answers(6), longest])), tokenizer)
    assert len(whole.by_id) == 7 and not whole.dropped


def test_equal_answers_with_other_labels_are_others(tmp_path, tokenizer):
    rows = answers(4)
    again = {**rows[0], "labels": [1, 1]}
    found = load_preferences(steps_recipe(write(tmp_path, [*rows, again])), tokenizer)
    assert len(found.by_id) == 5
    worst = sorted(one.labels[0] for one in found.by_id.values())
    np.testing.assert_array_equal(worst, [0, 0, 0, 0, 1])


def test_a_bad_row_far_down_is_found_before_anything_starts(tmp_path):
    rows = [*answers(30), {"prompt": "x", "chosen": "2", "rejected": "3"}]
    with pytest.raises(DataError, match=r"(?s)no 'completions'.*rows.jsonl:31"):
        refuse_unreadable_problems(steps_recipe(write(tmp_path, rows)))


def test_a_prompt_that_the_tokenizer_joins_with_the_first_step(tmp_path):
    """A server gets both as one text."""
    rows = [{"prompt": f"{n} b", "completions": ["c", "ab"], "labels": [1, 0]} for n in range(4)]
    joined = {"prompt": "5 a", "completions": [".", "b"], "labels": [1, 0]}
    config = recipe(
        write(tmp_path, [*rows, joined]),
        kind="reward_model",
        preferences={"loss": "stepwise", "step_token": "!"},
        domains=[
            {
                "name": "d",
                "source": "file",
                "path": str(tmp_path / "rows.jsonl"),
                "template": "{question}",
            }
        ],
    )
    found = load_preferences(config, joining_tokenizer())
    assert len(found.by_id) == 4
    assert list(found.dropped.values()) == [1]
