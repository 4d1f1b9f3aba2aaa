"""Responses of a data set as completions, and rejection samples on their way to another family."""

from __future__ import annotations

import asyncio
import json

import pytest

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.controller.rejection import _row
from grpo_megatron.data.dataset_answers import DatasetAnswers, refuse_bad_responses
from grpo_megatron.data.prompts import load_prompts, load_splits
from grpo_megatron.data.sources import load_problems
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.launch.bindings import refuse_unreadable_problems
from tests.data.chat_templates import write_tokenizer

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
USER = {"role": "user", "content": "What is 2 + 3?"}
REPLY = {"role": "assistant", "content": "<think>\n2 + 3 = 5\n</think>\n\n5"}
LONGEST = 100


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    names = ("qwen", "llama", "deepseek")
    return {name: load_tokenizer(write_tokenizer(root / name, name)) for name in names}


def prompts_of(tmp_path, tokenizer, *rows, **fields):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"name": "sums", "source": "file", "path": file, "template": "chat", **fields}
    domain = DomainConfig(rewards=REWARDS, **fields)
    return domain, load_prompts(domain, 0, tokenizer)


def texts_of(completions, tokenizer):
    """Completions with their special tokens."""
    texts = []
    for completion in completions:
        marks = [tokenizer.token_text(token) for token in completion.token_ids[-1:].tolist()]
        texts.append((tokenizer.decode(completion.token_ids), marks))
    return texts


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("qwen", REPLY["content"], "<|im_end|>"),
        ("llama", REPLY["content"], "<|eot_id|>"),
        ("deepseek", "2 + 3 = 5\n</think>\n\n5", "<｜end▁of▁sentence｜>"),  # opened by the prompt
    ],
)
def test_the_last_turn_is_trained_with_the_templates_end(tmp_path, tokenizers, name, text, end):
    tokenizer = tokenizers[name]
    domain, [prompt] = prompts_of(tmp_path, tokenizer, {"messages": [USER, REPLY]})
    answers = DatasetAnswers([domain], tokenizer, LONGEST)
    [group] = asyncio.run(answers.rollouts(3, [prompt]))
    assert texts_of(group.completions, tokenizer) == [(text, [end])]
    assert group.completions[0].finish_reason == "stop"
    assert texts_of([answers.first(0, prompt)], tokenizer) == [(text, [end])]
    assert REPLY["content"] not in prompt.text


def test_a_cold_start_trains_what_the_assistant_said(tmp_path, tokenizers):
    tokenizer = tokenizers["qwen"]
    domain, [prompt] = prompts_of(tmp_path, tokenizer, {"messages": [USER, REPLY], "answer": "5"})
    assert prompt.answer == "5"
    first = DatasetAnswers([domain], tokenizer, LONGEST).first(0, prompt)
    assert first.text == REPLY["content"]


def test_plain_templates_end_with_the_tokenizers_end(tmp_path, tokenizers):
    tokenizer = tokenizers["qwen"]
    row = {"question": "2 + 3?", "answer": "5", "responses": ["five", "it is 5"]}
    domain, [prompt] = prompts_of(tmp_path, tokenizer, row, template="{question}")
    answers = DatasetAnswers([domain], tokenizer, 4)
    [group] = asyncio.run(answers.rollouts(0, [prompt]))
    assert [c.text for c in group.completions] == ["five", "it is 5"]
    assert [c.finish_reason for c in group.completions] == ["length", "length"]
    assert answers.first(0, prompt).token_ids.tolist() == [
        *tokenizer.encode("5"),
        tokenizer.eos_token_id,
    ]


def test_a_response_is_made_of_the_fields_of_its_row(tmp_path, tokenizers):
    tokenizer = tokenizers["qwen"]
    rows = [
        {"question": "2 + 3?", "answer": "5", "thought": "count"},
        {"question": "3 + 4?", "answer": "7", "thought": "count", "responses": ["seven"]},
    ]
    domain, prompts = prompts_of(
        tmp_path,
        tokenizer,
        *rows,
        template="{question}<think>",
        response_template="{metadata[thought]}: {question}</think>{answer}",
    )
    answers = DatasetAnswers([domain], tokenizer, LONGEST)
    groups = asyncio.run(answers.rollouts(0, prompts))
    texts = [group.completions[0].text for group in groups]
    assert texts == ["count: 2 + 3?</think>5", "seven"]
    assert answers.first(0, prompts[0]).text == texts[0]
    assert prompts[0].answer == "5"


@pytest.mark.parametrize("prefix", ["", "<think>\n"])
def test_rejection_samples_go_from_one_family_to_another(tmp_path, tokenizers, prefix):
    """Sampled under a prompt that opened the thought; trained under one that does not."""
    name = "qwen" if prefix else "deepseek"
    domain, [prompt] = prompts_of(
        tmp_path,
        tokenizers[name],
        {"question": "What is 2 + 3?", "answer": "5"},
        system_prompt="Be brief.",
        assistant_prefix=prefix,
    )
    sampled = ["2 + 3 = 5\n</think>\n\n5", "five</think>5"]
    row = _row(prompt, sampled, domain)
    assert row["question"] == prompt.text
    assert row["responses"] == sampled
    system = {"role": "system", "content": "Be brief."}
    assert row["messages"] == [system, USER, REPLY]

    other = tokenizers["llama"]
    domain, [prompt] = prompts_of(tmp_path, other, row)
    assert prompt.metadata["messages"] == [system, USER]
    assert prompt.text.startswith("<|begin|>")
    [group] = asyncio.run(DatasetAnswers([domain], other, LONGEST).rollouts(0, [prompt]))
    assert [c.text for c in group.completions] == [REPLY["content"], "<think>\nfive</think>5"]


def test_rows_of_samples_have_what_their_prompt_had(tmp_path, tokenizers):
    """Times in messages as text, and the tools that the chat template wrote."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": [USER], "answer": "5", "tools": json.dumps(tools)}
    domain, [prompt] = prompts_of(tmp_path, tokenizers["qwen"], row)
    written = json.loads(json.dumps(_row(prompt, ["5"], domain)))
    assert written["tools"] == tools
    assert written["messages"] == [USER, {"role": "assistant", "content": "5"}]
    domain, [prompt] = prompts_of(tmp_path, tokenizers["qwen"], {"messages": [USER], "answer": "5"})
    assert "tools" not in _row(prompt, ["5"], domain)


def test_rows_of_plain_templates_have_no_messages(tmp_path, tokenizers):
    row = {"question": "2 + 3?", "answer": "5"}
    domain, [prompt] = prompts_of(tmp_path, tokenizers["qwen"], row, template="{question}")
    assert set(_row(prompt, ["5"], domain)) == {"question", "answer", "domain", "responses"}


# --- what the prompt has of an answer


OPENS = {"assistant_prefix": "<think>\n"}
CLOSES = {"template_arguments": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("name", "fields", "answer", "trained"),
    [
        ("deepseek", {}, "<think>t</think>5", "t</think>5"),
        ("deepseek", {}, "<think>\nt</think>5", "t</think>5"),
        ("deepseek", {}, "\n<think>\n\n</think>\n\n5", "</think>\n\n5"),
        ("qwen", OPENS, "<think> t</think>5", "t</think>5"),
        ("qwen", {"assistant_prefix": "Let me  think:"}, "Let me think: 5", " 5"),
        ("qwen", {"assistant_prefix": "I "}, "Is it 5? Yes", "Is it 5? Yes"),
        ("qwen", {"assistant_prefix": "I "}, "I\nthink 5", "think 5"),
        ("qwen", CLOSES, "<think>\n\n</think>\n\n5", "5"),
        ("qwen", CLOSES, "<think></think>5", "5"),
        ("qwen", CLOSES, "5", "5"),
        ("qwen", CLOSES, "<think>t</think>5", "<think>t</think>5"),
        ("qwen", {}, "<think>\n\n</think>\n\n5", "<think>\n\n</think>\n\n5"),
    ],
)
def test_what_the_prompt_has_is_not_trained_again(
    tmp_path, tokenizers, name, fields, answer, trained
):
    tokenizer = tokenizers[name]
    row = {"messages": [USER, {**REPLY, "content": answer}]}
    domain, [prompt] = prompts_of(tmp_path, tokenizer, row, **fields)
    [text] = DatasetAnswers([domain], tokenizer, LONGEST).texts(prompt)
    completion = DatasetAnswers([domain], tokenizer, LONGEST).completion(0, prompt, text)
    assert completion.text == trained


@pytest.mark.parametrize(
    ("fields", "answer", "words"),
    [
        (OPENS, "5", "1 answers do not close the thought that their prompt begins"),
        (CLOSES, "<think>t</think>5", "1 answers begin a thought behind one"),
    ],
)
def test_answers_that_do_not_fit_the_thought_of_their_prompt_are_told(
    tmp_path, tokenizers, caplog, fields, answer, words
):
    rows = [
        {"messages": [USER, {**REPLY, "content": "<think></think>5"}]},
        {"messages": [{**USER, "content": "3 + 2?"}, {**REPLY, "content": answer}]},
    ]
    config = recipe_of(tmp_path, rows, template="chat")
    domain = config.domains[0].model_copy(update=fields)
    load_splits(config.model_copy(update={"domains": (domain,)}), tokenizers["qwen"])
    [record] = caplog.records
    assert words in record.message and "rows.jsonl:2" in record.message


# --- several answers to a question


def responses_of(config, tokenizer):
    [prompt] = load_splits(config, tokenizer).train["sums"]
    return DatasetAnswers.of_run(config, tokenizer).texts(prompt)


def test_all_answers_to_a_question_are_trained(tmp_path, tokenizers, caplog):
    caplog.set_level("INFO")
    rows = [{"messages": [USER, {**REPLY, "content": text}]} for text in ("5", "five", "5")]
    rows.append({**rows[0], "responses": ["5", "V"]})
    config = recipe_of(tmp_path, rows, template="chat")
    assert responses_of(config, tokenizers["qwen"]) == ["5", "five", "V"]
    assert "3 of 4 rows have the prompt of an earlier one" in caplog.text


def test_answers_by_a_template_are_those_of_their_rows(tmp_path, tokenizers):
    rows = [{**PLAIN_ROW, "thought": "a"}, {**PLAIN_ROW, "thought": "b"}]
    config = recipe_of(tmp_path, rows)
    made = config.domains[0].model_copy(update={"response_template": "{metadata[thought]}{answer}"})
    config = config.model_copy(update={"domains": (made,)})
    assert responses_of(config, tokenizers["qwen"]) == ["a3", "b3"]


@pytest.mark.parametrize(("answer", "level"), [("3", "INFO"), ("4", "WARNING")])
def test_rl_drops_equal_prompts_and_says_of_which_domain(
    tmp_path, tokenizers, caplog, answer, level
):
    caplog.set_level("INFO")
    rows = [PLAIN_ROW, {**PLAIN_ROW, "answer": answer}, {**PLAIN_ROW, "question": "2 + 2?"}]
    config = recipe_of(tmp_path, rows, kind="rl")
    splits = load_splits(config, tokenizers["qwen"])
    assert [prompt.answer for prompt in splits.train["sums"]] == ["3", "3"]
    assert splits.num_duplicates == 1
    [record] = [record for record in caplog.records if "dropped" in record.message]
    assert record.levelname == level
    assert "domain 'sums': dropped 1 prompts that are before in 'sums'" in record.message
    assert ("1 of them have another answer" in record.message) == (level == "WARNING")


# --- responses that are no texts


def recipe_of(tmp_path, rows, *, template="{question}", **fields) -> RunConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = {"name": "sums", "source": "file", "path": str(file), "template": template}
    fields = {"kind": "sft", "data": {"num_validation": 0, "num_heldout": 0}, **fields}
    if fields["kind"] != "sft":
        domain["rewards"] = [{"function": REWARDS[0]["function"]}]
    return RunConfig.model_validate(
        {"name": "case", "model": {"preset": "tiny-qwen3-moe"}, "domains": [domain], **fields}
    )


def check(config: RunConfig) -> list[object]:
    [domain] = config.domains
    problems = load_problems(domain, 0)
    refuse_bad_responses(config, domain, problems)
    return [problem.metadata.get("responses") for problem in problems]


PLAIN_ROW = {"question": "1 + 2?", "answer": "3"}
CHAT_ROW = {"messages": [USER, REPLY]}
NOT_TEXTS = ["1234", [3], ["3", None], {"text": "3"}, 3]


@pytest.mark.parametrize("row", [PLAIN_ROW, CHAT_ROW], ids=["plain", "chat"])
@pytest.mark.parametrize("responses", NOT_TEXTS, ids=str)
def test_responses_that_are_no_texts_are_refused_with_their_line(tmp_path, row, responses):
    rows = [row, {**row, "responses": responses}]
    config = recipe_of(tmp_path, rows, template="chat" if row is CHAT_ROW else "{question}")
    with pytest.raises(DataError, match="expected a list of texts") as caught:
        check(config)
    assert caught.value.where.endswith("rows.jsonl:2")


def test_a_supervised_run_reads_its_responses_first(tmp_path, tokenizers):
    config = recipe_of(tmp_path, [PLAIN_ROW, {**PLAIN_ROW, "responses": "1234"}])
    with pytest.raises(DataError, match="expected a list of texts"):
        load_splits(config, tokenizers["qwen"])


def test_bad_responses_far_down_are_found_before_anything_starts(tmp_path):
    rows = [*[PLAIN_ROW] * 50, {**PLAIN_ROW, "responses": "1234"}]
    with pytest.raises(DataError, match=r"rows.jsonl:51"):
        refuse_unreadable_problems(recipe_of(tmp_path, rows))


@pytest.mark.parametrize("responses", [None, [], ""])
def test_a_row_without_responses_trains_its_answer(tmp_path, tokenizers, responses):
    config = recipe_of(tmp_path, [{**PLAIN_ROW, "responses": responses}])
    assert check(config) == [responses]
    [prompt] = load_splits(config, tokenizers["qwen"]).train["sums"]
    answers = DatasetAnswers(config.domains, tokenizers["qwen"], LONGEST)
    [group] = asyncio.run(answers.rollouts(0, [prompt]))
    assert [completion.text for completion in group.completions] == ["3"]


@pytest.mark.parametrize("row", [PLAIN_ROW, CHAT_ROW], ids=["plain", "chat"])
@pytest.mark.parametrize("responses", NOT_TEXTS, ids=str)
def test_where_no_responses_are_trained_the_field_is_the_rows_own(tmp_path, row, responses):
    template = "chat" if row is CHAT_ROW else "{question}"
    rows = [{**row, "responses": responses}]
    assert check(recipe_of(tmp_path, rows, template=template, kind="rl")) == [responses]


def test_a_cold_start_reads_responses_of_conversations(tmp_path):
    rows = [{**CHAT_ROW, "responses": [3]}]
    config = recipe_of(tmp_path, rows, template="chat", kind="rl", cold_start={})
    with pytest.raises(DataError, match="expected a list of texts"):
        check(config)
    rows = [{**PLAIN_ROW, "responses": [3]}]
    assert check(recipe_of(tmp_path, rows, kind="rl", cold_start={})) == [[3]]


# --- answers that are not trained as the row has them

CALL = {"type": "function", "function": {"name": "calc", "arguments": {"x": "1 + 1"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "", "tool_calls": [CALL]},
        {"content": "Let me see.", "tool_calls": [CALL]},
        {"function_call": CALL["function"]},
        {"reasoning_content": "count"},
        {"thinking": "count"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "count"}]},
        {"thought": "count"},
        {"tool_plan": "count"},
        {"tool_calls": '[{"name": "calc"}]'},
        {"function_call": {"name": "calc", "arguments": None}},
    ],
    ids=str,
)
def test_an_answer_that_says_more_than_its_content_is_refused(tmp_path, fields):
    rows = [CHAT_ROW, {"messages": [USER, {**REPLY, **fields}]}]
    for settings in ({"kind": "sft"}, {"kind": "rl", "cold_start": {}}):
        config = recipe_of(tmp_path, rows, template="chat", **settings)
        name = list(fields)[-1]
        with pytest.raises(DataError, match=f"has '{name}', and its content alone") as caught:
            check(config)
        assert caught.value.where.endswith("rows.jsonl:2")
        assert "<think>…</think>" in caught.value.remedy


def test_fields_that_say_nothing_more_pass(tmp_path):
    """Also those of earlier turns, which the chat template renders."""
    empty = {"tool_calls": [], "function_call": None, "reasoning_content": " \n"}
    earlier = {"role": "assistant", "content": "6", "reasoning_content": "count"}
    rows = [{"messages": [USER, earlier, USER, {**REPLY, "name": "adder", **empty}]}]
    assert check(recipe_of(tmp_path, rows, template="chat")) == [[REPLY["content"]]]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": "[]", "reasoning_details": "{}", "thought": " null "},
        {"function_call": {"name": None, "arguments": None}},
        {"function_call": {"name": "", "arguments": "{}"}, "audio": {"id": None, "parts": []}},
        {"tool_calls": [{"id": None, "function": {"name": None}}]},
    ],
    ids=str,
)
def test_tables_and_json_texts_without_a_value_say_nothing(tmp_path, fields):
    rows = [{"messages": [USER, {**REPLY, **fields}]}]
    assert check(recipe_of(tmp_path, rows, template="chat")) == [[REPLY["content"]]]


def test_where_no_answer_is_trained_it_may_say_more(tmp_path):
    """The content is the reference answer of RL."""
    rows = [{"messages": [USER, {**REPLY, "reasoning_content": "count"}]}]
    assert check(recipe_of(tmp_path, rows, template="chat", kind="rl")) == [[REPLY["content"]]]


EMPTY_ROWS = [
    ({"question": "1 + 2?", "answer": " "}, "{question}"),
    ({"question": "1 + 2?", "answer": "3", "responses": ["", " "]}, "{question}"),
    ({"messages": [USER, {**REPLY, "content": ""}]}, "chat"),
]


@pytest.mark.parametrize(("row", "template"), EMPTY_ROWS)
def test_a_file_of_empty_answers_is_refused_with_the_first(tmp_path, tokenizers, row, template):
    config = recipe_of(tmp_path, [row, row], template=template)
    for refuse in (check, lambda config: load_splits(config, tokenizers["qwen"])):
        with pytest.raises(DataError, match="answers of all rows of domain 'sums'") as caught:
            refuse(config)
        assert caught.value.where.endswith("rows.jsonl:1")


@pytest.mark.parametrize(("row", "template"), EMPTY_ROWS)
def test_empty_answers_are_left_out_and_counted(tmp_path, tokenizers, caplog, row, template):
    whole = CHAT_ROW if template == "chat" else PLAIN_ROW
    field = "messages" if template == "chat" else "question"
    other = json.loads(json.dumps(row).replace("?", "??"))
    partly = {**json.loads(json.dumps(whole).replace("?", "???")), "responses": ["", "three"]}
    if template == "chat":
        partly[field][-1]["content"] = ""
    config = recipe_of(tmp_path, [whole, other, partly, row], template=template)
    check(config)
    tokenizer = tokenizers["qwen"]
    prompts = load_splits(config, tokenizer).train["sums"]
    groups = asyncio.run(DatasetAnswers.of_run(config, tokenizer).rollouts(0, prompts))
    found = []
    for group in groups:
        found += [completion.text for completion in group.completions]
    expected = REPLY["content"] if template == "chat" else "3"
    assert sorted(found) == sorted([expected, "three"])
    assert "are left out, with 2 of 4 rows that have no other" in caplog.text
    assert "the first is at" in caplog.text and "rows.jsonl:2" in caplog.text


def test_an_answer_that_is_empty_behind_its_prompt_is_left_out(tmp_path, tokenizers, caplog):
    rows = [CHAT_ROW, {"messages": [{**USER, "content": "3 + 3?"}, {**REPLY, "content": "So"}]}]
    config = recipe_of(tmp_path, rows, template="chat")
    prefixed = config.domains[0].model_copy(update={"assistant_prefix": "So"})
    config = config.model_copy(update={"domains": (prefixed,)})
    [prompt] = load_splits(config, tokenizers["qwen"]).train["sums"]
    assert prompt.question == USER["content"]
    assert "1 answers are empty, or say no more than their prompt" in caplog.text


def test_an_answer_that_its_template_leaves_empty_is_left_out(tmp_path, tokenizers, caplog):
    rows = [{**PLAIN_ROW, "thought": "count"}, {"question": "2?", "answer": "2", "thought": ""}]
    config = recipe_of(tmp_path, rows)
    made = config.domains[0].model_copy(update={"response_template": "{metadata[thought]}"})
    config = config.model_copy(update={"domains": (made,)})
    [prompt] = load_splits(config, tokenizers["qwen"]).train["sums"]
    assert prompt.question == PLAIN_ROW["question"]
    assert "1 answers are empty" in caplog.text and "rows.jsonl:2" in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {**REPLY, "content": ""}]},
        {"messages": [USER, {**REPLY, "tool_calls": [CALL]}]},
        {**CHAT_ROW, "responses": [3]},
    ],
    ids=["empty", "untold", "no-texts"],
)
@pytest.mark.parametrize("settings", [{"kind": "sft"}, {"kind": "rl", "cold_start": {}}])
def test_a_domain_that_is_only_evaluated_may_have_any_answers(
    tmp_path, tokenizers, caplog, row, settings
):
    config = recipe_of(tmp_path, [row], template="chat", **settings)
    evaluated = config.domains[0].model_copy(update={"weight": 0.0})
    config = config.model_copy(update={"domains": (evaluated,)})
    check(config)
    assert len(load_splits(config, tokenizers["qwen"]).train["sums"]) == 1
    assert not caplog.records


def test_rl_and_its_cold_start_take_rows_without_an_answer(tmp_path):
    row = {"messages": [USER, {**REPLY, "content": ""}]}
    check(recipe_of(tmp_path, [row], template="chat", kind="rl", cold_start={}))


def test_a_response_may_be_made_of_other_fields_than_the_answer(tmp_path):
    row = {"question": "1 + 2?", "answer": "", "thought": "count"}
    config = recipe_of(tmp_path, [row])
    made = config.domains[0].model_copy(update={"response_template": "{metadata[thought]}"})
    assert check(config.model_copy(update={"domains": (made,)})) == [None]


# --- answers that are longer than is trained


def of_lengths(tmp_path, *, budget: int | None, answers) -> RunConfig:
    rows = [{"question": f"{number}?", "answer": text} for number, text in enumerate(answers)]
    rollout = {"max_new_tokens": 16, "max_model_len": 32}
    config = recipe_of(tmp_path, rows, rollout=rollout)
    domain = config.domains[0].model_copy(update={"max_new_tokens": budget})
    return config.model_copy(update={"domains": (domain,)})


@pytest.mark.parametrize("budget", [None, 8])
def test_answers_that_are_cut_are_told_when_the_domain_is_read(
    tmp_path, tokenizers, caplog, budget
):
    """An answer has its end within the budget of its domain."""
    tokenizer = tokenizers["qwen"]
    kept = budget or 16
    texts = [kept * "7", (kept - 1) * "7", "7", 2 * kept * "7"]
    assert len(tokenizer.encode(texts[0])) == kept
    config = of_lengths(tmp_path, budget=budget, answers=texts)
    splits = load_splits(config, tokenizer)
    assert f"2 answers of 2 rows are longer than max_new_tokens ({kept})" in caplog.text
    assert "rows.jsonl:1" in caplog.text
    answers = DatasetAnswers.of_run(config, tokenizer)
    groups = asyncio.run(answers.rollouts(0, splits.train["sums"]))
    found = {}
    for group in groups:
        [completion] = group.completions
        found[group.prompt.answer] = (completion.num_tokens, completion.truncated)
    assert found == {
        texts[0]: (kept, True),
        texts[1]: (kept, False),
        texts[2]: (2, False),
        texts[3]: (kept, True),
    }


def test_answers_that_are_whole_are_no_warning(tmp_path, tokenizers, caplog):
    load_splits(of_lengths(tmp_path, budget=None, answers=["7", "15 * 7"]), tokenizers["qwen"])
    assert "longer than max_new_tokens" not in caplog.text


def test_only_trained_rows_are_looked_at_for_answers_that_are_cut(tmp_path, tokenizers, caplog):
    """Not those whose prompt is too long, and no more than the first of many."""
    tokenizer = tokenizers["qwen"]
    rows = [{"question": 40 * "x", "answer": 30 * "7"}, {"question": "1", "answer": "7"}]
    config = recipe_of(tmp_path, rows, rollout={"max_new_tokens": 16, "max_model_len": 32})
    assert len(load_splits(config, tokenizer).train["sums"]) == 1
    assert "are dropped" in caplog.text
    assert "longer than max_new_tokens (" not in caplog.text


def test_of_many_rows_the_first_are_looked_at(tmp_path, tokenizers, caplog, monkeypatch):
    monkeypatch.setattr("grpo_megatron.data.dataset_answers.ROWS_LOOKED_AT", 3)
    monkeypatch.setattr("grpo_megatron.data.dataset_answers._TEXTS_AT_ONCE", 1)
    texts = ["7", 30 * "7", 30 * "7", 30 * "7"]
    load_splits(of_lengths(tmp_path, budget=None, answers=texts), tokenizers["qwen"])
    assert "of the first 3 rows, 2 answers of 2 rows are longer" in caplog.text
    assert "rows.jsonl:2" in caplog.text
