"""Each reward function: right, wrong, unreadable, and a reference answer that is no good."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.errors import DataError
from grpo_megatron.rewards import functions
from grpo_megatron.rewards.code_tests import last_code_block
from grpo_megatron.rewards.functions import (
    exact_match,
    extract,
    format_tags,
    format_think,
    numeric_match,
    reasoning_gym_score,
)

NAN = math.nan


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("85", "85", 1),
        (" 85\n", "85", 1),
        ("85", " 85", 1),
        ("8 5", "85", 0),
        ("", "85", 0),
        ("085", "85", 0),
        ("85", "", NAN),
    ],
)
def test_exact_match(completion, answer, score):
    np.testing.assert_equal(exact_match(completion, answer), float(score))


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("The answer is 85.", "85", 1),
        ("85 or 86", "85", 0),
        ("$1,234.50", "1234.5", 1),
        ("-7", "7", 0),
        ("x = -7", "-7", 1),
        ("42-17", "17", 1),
        ("1/2", "0.5", 1),
        ("1/0", "1", 0),
        (".5", "1/2", 1),
        ("1e3", "1000", 1),
        ("none", "3", 0),
        ("3", "three", NAN),
        ("3", "", NAN),
        ("3", "nan", NAN),
        ("12" * 3000, "1", 0),
        ("3.", "3", 1),
        ("1,2345", "2345", 1),
        ("The answer is −5", "5", 0),
        ("−5", "-5", 1),
        ("-5", "−5", 1),
        ("so it is –5", "-5", 1),
        ("pages 3–5", "5", 1),
        ("42−17", "17", 1),
        ("The balance is -$17", "17", 0),
        ("-$17", "-17", 1),
        ("−$1,700", "-1700", 1),
        ("$-17", "-17", 1),
        ("-€17", "-17", 1),
        (r"-\$17", "-17", 1),
        ("- $17", "17", 1),
        ("$42-$17", "17", 1),
        ("5", "-$5", 0),
        ("-5", "-$5", 1),
        ("5", "€5", 1),
        ("5", r"\$5", 1),
        ("3 1/2", "1/2", 0),
        ("3 1/2", "3.5", 1),
        ("-3 1/2", "-3.5", 1),
        ("3.5", "3 1/2", 1),
        ("-2 1/4", "-2 1/4", 1),
        ("3 1/0", "3", 0),
        ("3", "3 1/0", NAN),
        ("2, 1/2", "1/2", 1),
        ("10\u00a0000", "0", 0),
        ("10\u202f000", "10000", 1),
        (r"10\,000", "10000", 1),
        ("10{,}000", "10000", 1),
        (r"10,\!000", "10000", 1),
        ("10000", "10\u00a0000", 1),
        ("7\u00a0apples", "7", 1),
        ("5-", "5", 1),
        ("$", "5", 0),
        ("3", "$", NAN),
        ("-$ 5", "-5", 1),
        ("-$ 5", "5", 0),
        ("-5", "-$ 5", 1),
        ("5", "$ 5", 1),
        ("$ -5", "-5", 1),
        ("5", "0,5", NAN),
        ("35", "3,5", NAN),
        ("123", "1,2,3", NAN),
        ("1234", "12,34", NAN),
        ("1234567", "1234,567", NAN),
        ("500", "0,500", NAN),
        ("1000", "1_000", NAN),
        ("1000", "1 000", NAN),
        ("3", "infinity", NAN),
        ("1234567.5", "1,234,567.5", 1),
        ("35 1/2", "3,5 1/2", NAN),
        ("2500", "5,000/2", 1),
        ("1", "1e999999999", NAN),
    ],
)
def test_numeric_match(completion, answer, score):
    np.testing.assert_equal(numeric_match(completion, answer), float(score))


def test_numeric_tolerance_and_tags():
    assert numeric_match("0.33", "1/3", tolerance=0.01) == 1.0
    assert numeric_match("0.3", "1/3", tolerance=0.01) == 0.0
    for tolerance in (0.3, 0.6, 0.7, 0.15, 0.35, 1e-6, 2):
        bound = Decimal(str(tolerance))
        assert numeric_match(f"{5 + bound:f}", "5", tolerance=tolerance) == 1.0
        assert numeric_match(f"{5 - bound:f}", "5", tolerance=tolerance) == 1.0
        beyond = 5 + bound + Decimal("1e-12")
        assert numeric_match(f"{beyond:f}", "5", tolerance=tolerance) == 0.0
    assert numeric_match("<answer>4</answer> 5", "4", answer_tag="answer") == 1.0
    assert numeric_match("4", "4", answer_tag="answer") == 0.0


@given(st.integers())
def test_every_integer_matches_itself(number):
    assert numeric_match(f"so it is {number:,}", str(number)) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"\boxed{\frac12}", "1/2", 1),
        ("$0.5$", r"\frac{1}{2}", 1),
        ("x=3", "3", 1),
        (r"so $2\sqrt{2}$", r"\sqrt{8}", 1),
        ("$(1, 2)$", "(1,2)", 1),
        ("$(2, 1)$", "(1,2)", 0),
        ("", "3", 0),
        ("who knows", "3", 0),
        ("4", "3", 0),
        ("3", "", NAN),
        ("3", "who knows", NAN),
        (r"\boxed{x^2}", "x^2", 1),
        (r"\boxed{x^3}", "x^2", 0),
        (r"\boxed{2x+3}", "2x+3", 1),
        (r"\boxed{2}", "2x+3", 0),  # no number is read out of a formula
        (r"\boxed{p - q}", "p - q", 1),
        (r"\boxed{5}", r"\$5", 1),
        (r"\boxed{B}", "B", 1),
        (r"\boxed{C}", "B", 0),
        (r"\boxed{5}", "5 m/s", 1),
        (r"\boxed{5}", "5 apples", 1),
        (r"\boxed{12}", "12 cm^2", 1),
    ],
)
def test_math_verify(completion, answer, score):
    np.testing.assert_equal(functions.math_verify(completion, answer), float(score))


def test_reasoning_gym_uses_its_own_scorer():
    metadata = {"source_dataset": "chain_sum", "question": "37 + 48 ="}
    assert reasoning_gym_score(" 85 ", "85", metadata=metadata) == 1.0
    assert reasoning_gym_score("84", "85", metadata=metadata) < 0.1
    assert reasoning_gym_score("85", "85", metadata=metadata, answer_tag="answer") < 0.1
    with pytest.raises(DataError, match="source_dataset"):
        reasoning_gym_score("85", "85", metadata={})


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n<answer>b</answer>\n", 1),
        ("<think>a</think>b", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think><answer>b</answer>c", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("", 0),
    ],
)
def test_format_tags(completion, score):
    assert format_tags(completion, "") == score
    if score and completion.startswith("<think>"):
        rest = completion.removeprefix("<think>")
        assert format_tags(rest, "", opened=True) == 1 and format_tags(rest, "") == 0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think>b", 1),
        ("\n<think>\na\n</think>\n\nb\n", 1),
        ("<think>a</think>", 0),
        ("<think> </think>b", 0),
        ("<think>a", 0),
        ("b", 0),
        ("b<think>a</think>b", 0),
        ("<think>a</think>b<think>", 0),
        ("<think>a<think></think>b", 0),
        ("", 0),
    ],
)
def test_format_think(completion, score):
    assert format_think(completion, "") == score
    rest = completion.lstrip().removeprefix("<think>")
    if rest != completion.lstrip():
        assert format_think(rest, "", opened=True) == score


@pytest.mark.parametrize(
    ("completion", "content"),
    [
        ("<a>1</a> <a>2</a>", "2"),
        ("<a>1</a><a>2", "1"),
        ("1</a>", None),
        ("<a>1", None),
        ("<a><a>1</a>", "1"),
        ("", None),
    ],
)
def test_extract(completion, content):
    assert extract(completion, "a") == content
    assert extract(completion, None) == completion


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\nso\n```py\nb\n\nc\n```\nend", "b\n\nc"),
        ("```\na\n```\n```\nb", "a"),
        ("```\na", ""),
        ("a", ""),
        ("```\n```", ""),
        ("```python\na\nBetter:\n```python\nb\n```", "b"),
        ("```\na\n```py\nb\n```", "b"),
        ("```python\na\n```\n```python\nb", "a"),
        ("Use ```a```.\n```python\nb\n```", "b"),
        ("```python\na\n```\n```a```\nb", "a"),
        ("```a``` first\n```python\nb\n```", "b"),
        ("```python\na\n```b```\nc\n```", "a\n```b```\nc"),
        ("```python\na\n```  \nend", "a"),
        ("``` python\na\n```", "a"),
        ("```{.python}\na\n```", "a"),
        ("```c++\na\n```", "a"),
        ("````\n```python\na\n```\n````", "a"),
        ("````python\na\n```\nb\n````", "a\n```\nb"),
        ("1. So:\n   ```python\n   if a:\n       b\n\n   c\n   ```", "if a:\n    b\n\nc"),
        ("- ```python\n  a\n    b\n  ```", "a\n  b"),
        ("2) ```\n   a\n   ```\n", "a"),
        ('   ```python\n   a = """\nb\n"""\n   ```', 'a = """\nb\n"""'),
        ("```python\n    a\n```", "    a"),
        ("``\na\n``", ""),
        ("```python\r\na = 1\r\nb\r\n```\r\n", "a = 1\nb"),
        ("```python\na = 'x\u2028y'\n```", "a = 'x\u2028y'"),
        ("```python\na = 'x\x0cy\x85z'\n```", "a = 'x\x0cy\x85z'"),
    ],
)
def test_last_code_block(completion, code):
    assert last_code_block(completion) == code


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nprint(1)\n``` This prints 1.", "print(1)"),
        ("```python\nprint(1)\n```.", "print(1)"),
        ("```python\nprint(1)\n```</answer>", "print(1)"),
        ("- ```python\ndef f():\n  return 1\n```", "def f():\n  return 1"),
        ("1. ```python\n   x = 1\n   y = 2\n   ```", "x = 1\ny = 2"),
        ('```python title="x.py"\nq = 2\n```', "q = 2"),
        ("```{.python}\nq = 1\n```", "q = 1"),
        ("```c++\nint x;\n```", "int x;"),
    ],
)
def test_what_stands_behind_a_fence_and_before_a_line(completion, program):
    """Words behind the backticks that close a block do not open another one, and only lines that
    have the fence's indentation lose it."""
    assert last_code_block(completion) == program


def test_a_guess_in_the_thought_is_no_answer():
    for reward in (exact_match, numeric_match):
        assert reward("5? No.</think> 7", "7", think_tag="think") == 1
        assert reward("7? No.</think> 5", "7", think_tag="think") == 0
        assert reward("7", "7", think_tag="think") == 0
    tagged = "<answer>7</answer></think><answer>5</answer>"
    assert exact_match(tagged, "5", answer_tag="answer", think_tag="think") == 1
