"""Sources and templates: what is read, and one clear message for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.templates import PromptTemplate, ResponseTemplate
from grpo_megatron.data.sources import load_problems
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
ROWS = [
    {"question": "1+1", "answer": 2, "level": "easy", "topic": "sums"},
    {"question": "2*3", "answer": "6", "level": "hard", "topic": "products"},
]


def gym(**fields) -> DomainConfig:
    fields = {"dataset": "chain_sum", "num_problems": 5, **fields}
    return DomainConfig(name="addition", source="reasoning_gym", rewards=REWARDS, **fields)


def file(path: Path, **fields) -> DomainConfig:
    return DomainConfig(
        **{"name": "sums", "source": "file", "path": path, "rewards": REWARDS, **fields}
    )


def write(tmp_path: Path, rows: list, suffix: str) -> Path:
    path = tmp_path / f"problems{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_reasoning_gym_problems_follow_the_seed():
    arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    first, again, other = (load_problems(gym(arguments=arguments), seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 5
    assert first[0].metadata["source_dataset"] == "chain_sum"
    left, sign, right = first[0].metadata["expression"].split()
    total = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert total == int(first[0].answer)
    assert load_problems(gym(arguments={**arguments, "seed": 1}), 9) == first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset": "chain_sums"}, ["'chain_sums'", "did you mean 'chain_sum'"]),
        ({"arguments": {"min_digit": 2}}, ["'min_digit'", "did you mean 'min_digits'"]),
        ({"arguments": {"size": 2}}, ["num_problems"]),
        ({"arguments": {"min_terms": 4, "max_terms": 2}}, ["refuses its arguments", "min_terms"]),
        ({"prompt_field": "text"}, ["no field 'text'", "question"]),
    ],
)
def test_reasoning_gym_errors(fields, words):
    with pytest.raises(DataError) as caught:
        load_problems(gym(**fields), 0)
    for word in [*words, "addition"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files(tmp_path, suffix):
    rows = [{**row, "answer": str(row["answer"])} for row in ROWS]
    path = write(tmp_path, rows, suffix)
    problems = load_problems(file(path), 0)
    assert [(p.question, p.answer) for p in problems] == [("1+1", "2"), ("2*3", "6")]
    assert problems[1].metadata["level"] == "hard" and "answer" not in problems[1].metadata
    assert len(load_problems(file(path, num_problems=1), 0)) == 1
    chosen = load_problems(file(path, arguments={"domain_field": "topic"}), 0)
    assert [p.question for p in chosen] == ["1+1"]


def test_metadata_without_a_value_is_an_empty_text():
    """As CSV has it."""
    row = {"context": None, "level": 0}
    assert PromptTemplate("{metadata[context]}|{metadata[level]}").render("", row) == "|0"
    assert ResponseTemplate("{metadata[context]}{answer}").response("", "5", row) == "5"


def test_the_answer_after_a_marker(tmp_path):
    path = write(tmp_path, [{"question": "q", "answer": "1 + 1 = 2\n#### 2"}], ".jsonl")
    found = load_problems(file(path, arguments={"answer_after": "####"}), 0)
    assert found[0].answer == "2"
    with pytest.raises(DataError, match="nothing after"):
        load_problems(file(path, arguments={"answer_after": "@@"}), 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question": "q", "answer": "a"}\n{"question": \n', [":2", "not a JSON object"]),
        (b'{"question": "q", "answer": "a"}\n\n[1]\n', [":3", "JSON object", "list"]),
        (b'{"question": "q", "anwser": "a"}\n', [":1", "did you mean 'anwser'"]),
        (b'{"question": "q", "answer": null}\n', [":1", "'answer' is NoneType"]),
        (b'{"question": "q", "answer": true}\n', ["'answer' is bool"]),
        (b'{"question": "q", "answer": NaN}\n', [":1", "'answer' is nan", "as text"]),
        (b'{"question": "q", "answer": 1e400}\n', [":1", "'answer' is inf"]),
        (b'{"problem": "q", "answer": -Infinity}\n', [":1", "'answer' is -inf"]),
        (b'{"question": " ", "answer": "a"}\n', [":1", "'question' is empty"]),
        (b'{"question": "\xff", "answer": "a"}\n', [":1", "not a JSON object"]),
        (b"", ["no problems", "empty"]),
    ],
)
def test_bad_lines_are_named(tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_problems(file(path), 0)
    for word in [*words, str(path)]:
        assert word in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"(?s)unreadable: No such file.*gone.jsonl") as caught:
        load_problems(file(tmp_path / "gone.jsonl"), 0)
    assert "container" in caught.value.remedy


def test_bad_files(tmp_path):
    fake = tmp_path / "fake.parquet"
    fake.write_text("no parquet")
    for path, words in ((fake, "unreadable Parquet"), (tmp_path / "a.txt", "unknown file type")):
        with pytest.raises(DataError, match=words):
            load_problems(file(path), 0)
    path = write(tmp_path, ROWS, ".jsonl")
    with pytest.raises(DataError, match="no argument 'domain'"):
        load_problems(file(path, arguments={"domain": "x"}), 0)
    with pytest.raises(DataError, match="'topic' equal to 'algebra'"):
        load_problems(file(path, name="algebra", arguments={"domain_field": "topic"}), 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"answer_after": 3},
        {"answer_after": ""},
        {"domain_field": 3},
        {"domain_field": ["a"]},
        {"split": ["train"]},
        {"split": ""},
    ],
    ids=str,
)
def test_arguments_of_files_are_texts(tmp_path, arguments):
    [(key, value)] = arguments.items()
    domain = file(write(tmp_path, ROWS, ".jsonl"), arguments=arguments)
    with pytest.raises(DataError, match="expected a text that is not empty") as caught:
        load_problems(domain, 0)
    assert caught.value.where == f"[[domains]] sums, arguments.{key}"
    assert repr(value) in caught.value.message


PROBLEM = Problem("What is 37 + 48?", "85", {"expression": "37 + 48"})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", "What is 37 + 48?"),
        ("{metadata[expression]} =", "37 + 48 ="),
        ("{{x}} {question}\n{question}", "{x} What is 37 + 48?\nWhat is 37 + 48?"),
    ],
)
def test_templates(template, text):
    assert PromptTemplate(template).render(PROBLEM.question, PROBLEM.metadata) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{question} {answer}", "answer into the"),
        ("{question} {metadata[Answer]}", "answer into the"),
        ("{question} {metadata[solution]}", "answer into the"),
        ("{question.upper}", "not supported"),
        ("{question!r}", "not supported"),
        ("{question:>9}", "not supported"),
        ("{metadata}", "not supported"),
        ("{metadata[a][b]}", "not supported"),
        ("{}", "not supported"),
        ("{prompt}", "not supported"),
        ("{question", "literal braces"),
        ("plain", "no field"),
    ],
)
def test_templates_are_checked_before_any_problem_is_read(template, words):
    with pytest.raises(DataError, match=words):
        PromptTemplate(template)


def test_a_missing_metadata_key_names_the_known_ones():
    with pytest.raises(DataError, match="metadata of that problem: expression"):
        PromptTemplate("{metadata[expr]}").render(PROBLEM.question, PROBLEM.metadata)
