"""Arithmetic of texts is that of fractions, and nothing else is read."""

from __future__ import annotations

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.environments.arithmetic import LONGEST, ArithmeticFault, evaluate, written

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def joined(parts):
    """Text and value of two expressions with an operator between; None where it is undefined."""
    (left_text, left), sign, (right_text, right) = parts
    if left is None or right is None or (sign in ("/", "//", "%") and right == 0):
        value = None
    else:
        value = Fraction(OPERATORS[sign](left, right))
    return f"({left_text} {sign} {right_text})", value


def negated(part):
    text, value = part
    return f"-{text}", None if value is None else -value


WHOLE = st.integers(0, 999).map(lambda number: (str(number), Fraction(number)))
DECIMAL = st.builds(
    lambda whole, part: (f"{whole}.{part:02d}", Fraction(whole * 100 + part, 100)),
    st.integers(0, 99),
    st.integers(0, 99),
)
EXPRESSIONS = st.recursive(
    WHOLE | DECIMAL,
    lambda inner: (
        st.tuples(inner, st.sampled_from(list(OPERATORS)), inner).map(joined) | inner.map(negated)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_values_are_those_of_fractions(expression):
    text, value = expression
    if value is None:
        with pytest.raises(ArithmeticFault, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == value


@given(st.fractions(max_denominator=50), st.integers(-9, 9))
def test_powers_are_those_of_fractions(base, exponent):
    text = f"({base.numerator}/{base.denominator}) ** ({exponent})"
    if base == 0 and exponent < 0:
        with pytest.raises(ArithmeticFault, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == base**exponent


@given(st.fractions(max_denominator=10**6))
def test_what_is_written_is_the_number(value):
    exact, _, about = written(value).partition(" (about ")
    assert Fraction(exact) == value
    if about:
        assert float(about.rstrip(")")) == pytest.approx(float(value), rel=1e-10)


@given(st.text(max_size=40))
def test_any_other_text_is_refused(text):
    try:
        value = evaluate(text)
    except ArithmeticFault as error:
        assert str(error)
    else:
        assert isinstance(value, Fraction)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("37 + 48", "85"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-1 / 8", "-0.125"),
        ("22 / 7", "22/7 (about 3.14285714286)"),
        ("2 ** 10", "1024"),
        (" 1_000 * 3 ", "3000"),
        ("1.5e3", "1500"),
        ("0x10", "16"),
        ("1 ** 999999999999", "1"),
        ("1 / 2 ** 20", "1/1048576 (about 9.53674316406e-7)"),
    ],
)
def test_results_as_they_are_shown(text, shown):
    assert written(evaluate(text)) == shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no arithmetic"),
        ("2 ^ 3", r"write \*\*"),
        ("1,000 + 1", "without commas"),
        ("sqrt(4)", "is no arithmetic"),
        ("__import__('os')", "is no arithmetic"),
        ("x + 1", "'x' is no arithmetic"),
        ("1 if 2 else 3", "is no arithmetic"),
        ("[1 for i in range(9)]", "is no arithmetic"),
        ("'a' * 9", "is no number"),
        ("True + 1", "is no number"),
        ("2j", "is no number"),
        ("4 ** 0.5", "no whole number"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** -999999999", "too large"),
        ("1e999999999", "too large"),
        ("1e400 ** 9", "too large"),
        ("1e400 * 1e400 * 1e400 * 1e400", "bits"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("(" * 250 + "1" + ")" * 40, "no arithmetic"),
        ("1\0", "cannot be read|no arithmetic"),
        ("1" * (LONGEST + 1), f"{LONGEST} are allowed"),
    ],
)
def test_each_refusal_says_why(text, words):
    with pytest.raises(ArithmeticFault, match=words):
        evaluate(text)
