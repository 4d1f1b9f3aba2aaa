"""Exact arithmetic of texts: `3 * (4 - 1/3)` is 11. Nothing is run: the text becomes a tree of
operators and numbers, and each is checked before it is computed."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

LONGEST = 300
"""Characters of an expression."""
LARGEST_BITS = 4096
"""Bits of the numerator and of the denominator of every number that is computed."""
_LARGEST_EXPONENT = 400
"""Of a literal such as 1e10: the number itself is made before its bits can be counted."""
_MOST_DIGITS = 12

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_KNOWN = "there are numbers, + - * / // % ** and parentheses"
_EXPONENT = re.compile(r"[eE]([-+]?\d+)\Z")


class ArithmeticFault(ValueError):
    """An expression that cannot be computed; its text says why."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value; ArithmeticFault where the text is no arithmetic, or too large."""
    text = expression.strip()
    if len(text) > LONGEST:
        raise ArithmeticFault(f"the expression has {len(text)} characters, {LONGEST} are allowed")
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except SyntaxError as error:
        raise ArithmeticFault(f"this is no arithmetic: {error.msg}; {_KNOWN}") from error
    except ZeroDivisionError as error:
        raise ArithmeticFault("division by zero") from error
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, ArithmeticFault):
            raise
        raise ArithmeticFault(f"the expression cannot be read; {_KNOWN}") from error


def written(value: Fraction) -> str:
    """Return a number as people write it: `42`, `0.125`, or `22/7 (about 3.14285714286)`."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    if rest == 1:
        digits = _decimals(value)
        if len(digits) <= _MOST_DIGITS:
            return digits
    about = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{value.numerator}/{value.denominator} (about {about:.{_MOST_DIGITS}g})"


def _decimals(value: Fraction) -> str:
    """Return the finite decimals of a fraction whose denominator has the factors 2 and 5 only."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return _bounded(_number(node, text))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp):
        left = _value(node.left, text)
        right = _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
        if isinstance(node.op, ast.BitXor):
            raise ArithmeticFault("^ is no power here: write **")
    if isinstance(node, ast.Tuple):
        raise ArithmeticFault("write numbers without commas: 1000, not 1,000")
    found = ast.get_source_segment(text, node) or type(node).__name__
    raise ArithmeticFault(f"{found[:40]!r} is no arithmetic; {_KNOWN}")


def _number(node: ast.Constant, text: str) -> Fraction:
    """Return a literal, exactly as it is written: 0.1 is one tenth."""
    if type(node.value) is int:
        return Fraction(node.value)
    segment = ast.get_source_segment(text, node) or ""
    if type(node.value) is not float:
        raise ArithmeticFault(f"{segment[:40]!r} is no number; {_KNOWN}")
    exponent = _EXPONENT.search(segment)
    if exponent and abs(int(exponent[1])) > _LARGEST_EXPONENT:
        raise ArithmeticFault(f"{segment} is too large or too small")
    return Fraction(Decimal(segment.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault(f"the exponent {written(exponent)} is no whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent.numerator) > 2 * LARGEST_BITS:
        raise ArithmeticFault("the power is too large")
    return _bounded(Fraction(base**exponent.numerator))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ArithmeticFault(f"a number has more than {LARGEST_BITS} bits")
    return value
