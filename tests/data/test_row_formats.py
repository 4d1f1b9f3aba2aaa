"""Rows as people have them: conversations, and benchmarks as they are published."""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import json
import pickle
import zlib

import pytest

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.row_formats import last_boxed, problem_of
from grpo_megatron.errors import DataError
from grpo_megatron.rewards.code_tests import code_tests
from tests.rewards.sandboxes import needs_sandbox

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
WHERE = "rows.jsonl:7"
USER = {"role": "user", "content": "What is 2 + 3?"}
REPLY = {"role": "assistant", "content": "<think>\n2 + 3 = 5\n</think>\n\n5"}


def problem(row, **fields):
    fields = {"name": "sums", "source": "file", "path": "rows.jsonl", **fields}
    return problem_of(WHERE, row, DomainConfig(rewards=REWARDS, **fields))


def refused(row, **fields) -> DataError:
    with pytest.raises(DataError) as caught:
        problem(row, **fields)
    assert WHERE in caught.value.where
    return caught.value


# --- fields


@pytest.mark.parametrize("field", ["question", "prompt"])
def test_usual_fields_are_found(field):
    found = problem({field: "2 + 3?", "answer": 5, "level": 1})
    assert (found.question, found.answer) == ("2 + 3?", "5")
    assert found.metadata["level"] == 1


def test_a_missing_field_is_told_with_the_ones_that_are_there():
    error = refused({"querry": "2 + 3?", "answer": "5"}, prompt_field="query")
    assert "no field 'query'; the row has: querry, answer" in str(error)
    assert "did you mean 'querry'?" in error.remedy
    assert "set prompt_field" in error.remedy
    error = refused({"question": "2 + 3?", "result": "5"})
    assert "no field 'answer'; the row has: question, result" in str(error)
    assert "set answer_field" in error.remedy


def test_a_field_that_is_named_is_the_only_one():
    refused({"prompt": "2 + 3?", "answer": "5"}, prompt_field="text")


# --- conversations


@pytest.mark.parametrize("field", ["messages", "prompt", "question"])
def test_a_conversation_is_the_prompt(field):
    found = problem({field: [USER], "answer": "5"}, template="chat")
    assert found.metadata["messages"] == [USER]
    assert (found.question, found.answer) == ("What is 2 + 3?", "5")
    assert "responses" not in found.metadata


def test_a_conversation_comes_before_the_question_that_was_made_of_it():
    row = {"question": "<|im_start|>user…", "messages": [USER], "answer": "5"}
    assert problem(row, template="chat").question == "What is 2 + 3?"
    plain = problem(row)
    assert plain.question == "<|im_start|>user…"


def test_a_conversation_whose_user_says_nothing_is_refused():
    error = refused({"messages": [USER, REPLY, USER | {"content": " "}, REPLY]}, template="chat")
    assert "the last message of the user is empty" in str(error)


def test_the_last_turn_of_the_assistant_is_the_answer():
    found = problem({"messages": [USER, REPLY, USER, REPLY]}, template="chat")
    assert found.metadata["messages"] == [USER, REPLY, USER]
    assert found.answer == REPLY["content"]
    assert found.metadata["responses"] == [REPLY["content"]]
    other = problem({"messages": [USER, REPLY], "answer": "5"}, template="chat")
    assert other.answer == "5"
    assert other.metadata["responses"] == [REPLY["content"]]


def test_responses_get_the_beginning_that_their_prompt_had():
    row = {
        "messages": [USER, REPLY],
        "answer": "5",
        "responses": ["2 + 3 = 5\n</think>\n\n5", "it is 5</think>5"],
    }
    found = problem(row, template="chat")
    assert found.metadata["responses"] == [REPLY["content"], "<think>\nit is 5</think>5"]


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        (["r1", "r2"], [REPLY["content"], "r1", "r2"]),
        ([REPLY["content"], "r2", "r2"], [REPLY["content"], "r2"]),
        (["", "r2"], [REPLY["content"], "", "r2"]),
    ],
)
def test_whole_responses_are_beside_the_last_turn(responses, expected):
    found = problem({"messages": [USER, REPLY], "responses": responses}, template="chat")
    assert found.metadata["responses"] == expected


def test_a_response_template_makes_the_response_of_a_conversation_too():
    made = {"template": "chat", "response_template": "so</think>{answer}"}
    row = {"messages": [USER, REPLY], "answer": "5"}
    assert "responses" not in problem(row, **made).metadata
    found = problem(row | {"responses": ["five"]}, **made)
    assert found.metadata["responses"] == [REPLY["content"], "five"]


@pytest.mark.parametrize("nothing", [None, [], {}, "", " \n"], ids=str)
def test_a_field_without_a_value_is_not_the_prompt(nothing):
    for template in ("chat", "{question}"):
        found = problem(
            {"messages": nothing, "question": "2 + 3?", "answer": "5"}, template=template
        )
        assert found.question == "2 + 3?"
    found = problem({"question": nothing, "prompt": "2 + 3?", "answer": "5"})
    assert found.question == "2 + 3?"


@pytest.mark.parametrize("field", ["messages", "prompt", "question"])
def test_a_conversation_may_be_text_of_json(field):
    """As CSV has it."""
    row = {field: json.dumps([USER, REPLY]), "answer": "5"}
    found = problem(row, template="chat")
    assert found.metadata["messages"] == [USER]
    assert found.metadata["responses"] == [REPLY["content"]]
    assert "is a conversation" in str(refused(row))


def test_messages_that_are_other_text_are_no_prompt():
    row = {"messages": "[{'role': 'user', 'content': 'hi'}]", "answer": "5"}
    for template in ("chat", "{question}"):
        error = refused(row, template=template)
        assert "field 'messages' is text, and no JSON of a list of messages" in str(error)
        assert problem({**row, "question": "2 + 3?"}, template=template).question == "2 + 3?"
    assert (
        problem({"messages": "2 + 3?", "answer": "5"}, prompt_field="messages").question == "2 + 3?"
    )


def test_values_of_messages_can_be_written_as_json():
    """Parquet has times and decimals, which rejection sampling writes with the conversation."""
    more = {
        "timestamp": datetime.datetime(2023, 4, 9, 0, 12),
        "scores": [decimal.Decimal("0.5"), {"day": datetime.date(2023, 4, 9), "toxic": False}],
    }
    found = problem({"messages": [USER | more], "answer": "5"}, template="chat")
    [message] = json.loads(json.dumps(found.metadata["messages"]))
    assert message["timestamp"] == "2023-04-09T00:12:00"
    assert message["scores"] == ["0.5", {"day": "2023-04-09", "toxic": False}]
    error = refused({"messages": [USER | {"hash": b"1"}], "answer": "5"}, template="chat")
    assert "field 'hash' has a value of bytes" in str(error)
    assert "field 'messages', message 1" in error.where


def test_a_message_with_calls_needs_no_content():
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "5"}
    found = problem({"messages": [USER, calling, result], "answer": "5"}, template="chat")
    assert found.metadata["messages"][1] == calling | {"content": ""}
    error = refused({"messages": [USER, calling | {"tool_calls": []}]}, template="chat")
    assert "content is NoneType" in str(error)
    assert '"" where it says nothing' in error.remedy


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (USER, "is one message, expected a list of messages"),
        ({"role": "abcd", "content": "user"}, "is one message, expected a list of messages"),
        ({"role": ["user"], "content": ["a", "b"]}, "has lists of different lengths: 1 of 'role'"),
    ],
)
def test_a_table_that_is_no_conversation_is_refused(value, words):
    error = refused({"messages": value, "answer": "5"}, template="chat")
    assert f"field 'messages' {words}" in error.message


def test_a_conversation_without_an_answer_is_refused():
    assert "no field 'answer'" in str(refused({"messages": [USER]}, template="chat"))


def test_a_plain_template_renders_no_conversation():
    error = refused({"messages": [USER], "answer": "5"})
    assert "is a conversation" in str(error)
    assert 'template = "chat"' in error.remedy


def test_parts_of_text_are_put_together_and_others_refused():
    text = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 3?"}]
    row = {"messages": [{"role": "user", "content": text}], "answer": "5"}
    assert problem(row, template="chat").metadata["messages"][0]["content"] == "2 + 3?"
    text.append({"type": "image_url", "image_url": "x.png"})
    error = refused(row, template="chat")
    assert "no text" in str(error)
    assert "message 1" in error.where and "write <image> in the text" in error.remedy
    text[-1] = {"type": "input_audio", "input_audio": {}}
    assert "leave out rows" in refused(row, template="chat").remedy


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}], "no message of a user"),
        ([{"content": "x"}], "no role; it has: content"),
        ([USER, {"role": "assistant", "content": None}], "content is NoneType"),
        ([USER, "hello"], "a message is str"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, words):
    assert words in str(refused({"messages": messages, "answer": "5"}, template="chat"))


def test_a_table_of_lists_is_a_conversation():
    row = {"messages": {"role": ["user"], "content": ["2 + 3?"]}, "answer": "5"}
    found = problem(row, template="chat")
    assert found.metadata["messages"] == [{"role": "user", "content": "2 + 3?"}]


# --- MATH and AIME


def test_math_has_its_answer_in_a_box():
    row = {
        "problem": "Find $x$.",
        "level": "Level 5",
        "type": "Algebra",
        "solution": "First \\boxed{1}. So $x = \\boxed{\\frac{1}{2}}$.",
    }
    found = problem(row)
    assert (found.question, found.answer) == ("Find $x$.", "\\frac{1}{2}")
    assert (found.metadata["level"], found.metadata["type"]) == ("Level 5", "Algebra")


def test_math_500_and_aime_have_a_field_for_it():
    row = {"problem": "Find $x$.", "solution": "\\boxed{1}", "answer": "2", "subject": "Algebra"}
    assert problem(row).answer == "2"
    assert problem({"id": 60, "problem": "Find it.", "answer": 204}).answer == "204"
    upper = problem({"ID": "2024-I-1", "Problem": "Find it.", "Solution": "…", "Answer": 204})
    assert (upper.question, upper.answer) == ("Find it.", "204")


SOLVED = {
    "problem": "Find $x$.",
    "solution": "It is \\boxed{5}.",
    "messages": [{"role": "user", "content": "Find $x$."}, REPLY],
}


@pytest.mark.parametrize("answer", [{}, {"answer": "5"}], ids=["NuminaMath", "OpenR1-Math"])
def test_a_conversation_of_math_ends_before_its_solution(answer):
    found = problem(SOLVED | answer, template="chat")
    assert found.metadata["messages"] == SOLVED["messages"][:1]
    assert (found.question, found.answer) == ("Find $x$.", "5")
    assert found.metadata["responses"] == [REPLY["content"]]
    plain = problem(SOLVED | answer)
    assert (plain.question, plain.answer) == ("Find $x$.", "5")


def test_a_field_that_is_named_comes_before_the_format_of_math():
    asked = problem(SOLVED, template="chat", prompt_field="problem")
    assert (asked.question, asked.answer) == ("Find $x$.", "5")
    assert "messages" not in asked.metadata
    told = problem(SOLVED, template="chat", prompt_field="messages")
    assert told.metadata["messages"] == SOLVED["messages"][:1]
    assert told.answer == REPLY["content"]
    solution = problem({"problem": "Find it.", "solution": "Two."}, answer_field="solution")
    assert solution.answer == "Two."
    refused(SOLVED, prompt_field="text")


def test_a_solution_without_a_box_is_refused():
    error = refused({"problem": "Find $x$.", "solution": "It is 2."})
    assert "no \\boxed" in str(error)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{a{b}c} and more}", "a{b}c"),
        ("\\boxed 5.", "5"),
        ("\\fbox{ 7 }", "7"),
        ("\\boxed{1}, \\boxed{2}", "2"),
        ("\\boxed{never closed", None),
        ("none", None),
    ],
)
def test_the_last_box_counts(solution, answer):
    assert last_boxed(solution) == answer


# --- GPQA


def test_gpqa_becomes_four_choices_in_an_order_of_the_rows_own():
    row = {
        "Question": "Which?\n",
        "Correct Answer": "the right one\n",
        "Incorrect Answer 1": "wrong a",
        "Incorrect Answer 2": "wrong b",
        "Incorrect Answer 3": "wrong c",
        "Subdomain": "Physics",
    }
    found = problem(row)
    assert found == problem(dict(reversed(row.items())))
    lines = found.question.splitlines()
    assert lines[0] == "Which?"
    assert [line[:3] for line in lines[2:]] == ["A) ", "B) ", "C) ", "D) "]
    assert f"{found.answer}) the right one" in lines
    assert found.metadata["subdomain"] == "Physics"
    assert "correct_answer" not in found.metadata


def test_right_choices_of_gpqa_are_on_every_letter():
    letters = set()
    for number in range(40):
        row = {"Question": f"Which of {number}?", "Correct Answer": "right"}
        row |= {f"Incorrect Answer {wrong}": f"wrong {wrong}" for wrong in (1, 2, 3)}
        letters.add(problem(row).answer)
    assert letters == set("ABCD")


def test_benchmarks_ask_their_own_question():
    """Not a conversation that is beside it."""
    messages = [USER, REPLY]
    gpqa = {"Question": "Which?", "Correct Answer": "right", "messages": messages}
    gpqa |= {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
    for row in (gpqa, lcb("[]", messages=messages)):
        found = problem(row, template="chat")
        assert "messages" not in found.metadata
        told = problem(row, template="chat", prompt_field="messages")
        assert told.metadata["messages"] == [USER]


@pytest.mark.parametrize("wrong", ["1", "2", "3"])
def test_gpqa_whose_wrong_choice_is_right_is_refused(wrong):
    row = {"Question": "Which?", "Correct Answer": "right\n"}
    row |= {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
    error = refused(row | {f"Incorrect Answer {wrong}": " right"})
    assert f"'incorrect_answer_{wrong}' is the correct answer, 'right'" in str(error)


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "", "answer": "2"},
        {"Problem": " \n", "Solution": "\\boxed{2}"},
        {"question_content": "", "public_test_cases": "[]"},
        {
            "Question": " ",
            "Correct Answer": "a",
            "Incorrect Answer 1": "b",
            "Incorrect Answer 2": "c",
            "Incorrect Answer 3": "d",
        },
    ],
    ids=["AIME", "MATH", "LiveCodeBench", "GPQA"],
)
def test_a_benchmark_without_its_question_is_refused(row):
    assert "is empty" in str(refused(row))


def test_fields_with_the_same_name_are_refused_where_one_would_be_lost():
    error = refused({"problem": "Find it.", "Problem": "Find that.", "answer": "2"})
    assert "'problem' and 'Problem' have the same name" in str(error)
    own = problem({"question": "2 + 3?", "answer": "5", "id": 1, "ID": 2})
    assert (own.metadata["id"], own.metadata["ID"]) == (1, 2)


# --- LiveCodeBench

CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
MORE = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]


def lcb(private, **fields):
    return {
        "question_title": "sum",
        "question_content": "Print the sum.",
        "starter_code": "",
        "public_test_cases": json.dumps(CASES),
        "private_test_cases": private,
        "difficulty": "easy",
        **fields,
    }


def packed(text) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


@pytest.mark.parametrize("private", [json.dumps(MORE), packed(json.dumps(MORE))])
def test_live_code_bench_has_tests_of_programs(private):
    found = problem(lcb(private))
    assert found.question == "Print the sum."
    tests = json.loads(found.answer)
    assert (tests["inputs"], tests["outputs"]) == (["1 2\n", "5 5\n"], ["3\n", "10\n"])
    assert found.metadata["difficulty"] == "easy"
    assert "private_test_cases" not in found.metadata


def test_live_code_bench_has_tests_of_methods():
    case = {"input": '[1, 2]\n"a"', "output": "true", "testtype": "functional"}
    row = lcb(
        "[]",
        public_test_cases=json.dumps([case]),
        starter_code="class Solution:\n    def f(self, a, b):",
        metadata=json.dumps({"func_name": "f"}),
    )
    found = problem(row)
    assert "class Solution:" in found.question
    assert json.loads(found.answer)["asserts"] == [
        "assert json.loads(json.dumps(Solution().f([1, 2], 'a'))) == True"
    ]


STARTER = "class Solution:\n    def pair(self, numbers: List[int]) -> Optional[List[int]]:\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return [numbers[0], gcd(*numbers)]", 1),
        ("return numbers[0], math.gcd(*numbers)", 1),  # a tuple
        ("return list(Counter(numbers))[:1] + [reduce(gcd, numbers)]", 1),
        ("return [numbers[0]]", 0),
        ("return {4, 2}", 0),
        ("return print", 0),
    ],
)
def test_the_code_to_begin_with_runs_as_it_is(body, score):
    case = {"input": "[4, 6]", "output": "[4, 2]", "testtype": "functional"}
    details = json.dumps({"func_name": "pair"})
    row = lcb("[]", public_test_cases=json.dumps([case]), starter_code=STARTER, metadata=details)
    completion = f"```python\n{STARTER}        {body}\n```"
    assert code_tests(completion, problem(row).answer, timeout_s=60.0) == score


@needs_sandbox
def test_programs_of_live_code_bench_may_leave_out_imports():
    tests = problem(lcb(json.dumps(MORE))).answer
    program = "print(reduce(operator.add, map(int, input().split())))"
    assert code_tests(f"```python\n{program}\n```", tests, timeout_s=60.0) == 1


def test_a_pickle_that_would_call_something_is_refused():
    class Evil:
        def __reduce__(self):
            return (print, ("called",))

    error = refused(lcb(packed(Evil())))
    assert "print is no text" in str(error)
    assert "no tests" in str(refused(lcb("not base 64!")))


def test_rows_without_a_method_are_refused():
    case = {"input": "1", "output": "1", "testtype": "functional"}
    row = lcb("[]", public_test_cases=json.dumps([case]), metadata="{}")
    assert "tests cannot be read" in str(refused(row))


@pytest.mark.parametrize("cases", ["[1, 2]", '["a"]', {"input": "1", "output": "2"}])
def test_tests_that_are_no_tables_are_refused(cases):
    error = refused(lcb("[]", public_test_cases=cases))
    assert "field 'public_test_cases' holds no tests: test 1 is" in str(error)
    assert "input and output" in str(error)


@pytest.mark.parametrize("case", [{"input": 5, "output": "2", "testtype": "functional"}, {}])
def test_tests_without_their_texts_are_refused(case):
    row = lcb("", public_test_cases=json.dumps([case]), metadata='{"func_name": "f"}')
    assert "tests cannot be read" in str(refused(row))


def test_a_damaged_pickle_is_refused():
    whole = pickle.dumps(json.dumps(CASES))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        private = base64.b64encode(zlib.compress(bytes(damaged))).decode()
        with contextlib.suppress(DataError):
            problem(lcb(private))
