"""How `math_verify` reads an answer: as one number with its unit, as a formula, or not at all.

Out of a text that is not in `$…$`, math-verify takes one number and leaves the rest: 7 of "3, 5, 7"
and 2 of "2^{10}". So only what is one number goes to it as such; all else goes as a formula, or is
nothing that a completion could be held against."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

TIMEOUT_S = 2  # math-verify's own, in whole seconds, beneath the pool's hard limit
_LONGEST_ANSWER = 200  # characters of a completion that may be an answer alone

# --- signs

_NO_BREAK_SPACES = "\u00a0\u2007\u2009\u202f"
_SPACE_OF_THOUSANDS = re.compile(
    rf"(?<=\d)(?:[{_NO_BREAK_SPACES}]|\\[,:; ]|,\\!|\{{,\}})(?=\d{{3}}(?!\d))"
)
_DASH_AS_MINUS = re.compile(r"(?<![\w)])–(?=[\d.$])")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,9})\.(\d{0,9})\\overline\{(\d{1,9})\}")
_ROOT = re.compile(r"√\s*(?:([\d.]+|[a-zA-Z])|\(([^()]*)\))")
_MIXED = re.compile(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])")
_MIXED_ALONE = re.compile(r"(?<=[{$])([-+]?\d+) (\d+)/(\d+)(?=[}$])")

_FRACTION_OF_PERCENT = re.compile(
    r"(?<![\d.}])(?P<whole>\d{1,9})?\\[dt]?frac(?:\{(?P<top>\d{1,9})\}\{(?P<bottom>[1-9]\d{0,8})\}"
    r"|[ ]?(?P<short_top>\d)(?P<short_bottom>[1-9]))[ ]*\\?%"
)
"""math-verify reads it as the text that it is."""

_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALE = rf"(?:{'|'.join(_SCALES)})s?"
_SCALED = re.compile(
    rf"""
    (?<![\w.,/^])(?<!\d[-–])(?<!\d[ ][-–][ ])
    (?P<open>\\boxed\{{[ ]*(?:\\?\$)?[-+]?|\$[-+]?)?
    (?:(?:(?P<whole>\d{{1,9}})[ ])?(?P<top>\d{{1,9}})/(?P<bottom>[1-9]\d{{0,8}})
        |(?P<decimal>(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{1,15}})(?:\.\d{{1,15}})?))
    (?P<close>(?(open)\}}?\$?|))
    (?:[ ~]|\\[ ,;:])*
    (?P<text>\\(?:text|textbf|textrm|mathrm|mbox)\{{[ ]*)?
    (?P<scales>{_SCALE}(?:[ ]{_SCALE}){{0,3}})(?![\w-])
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""A number before words for powers of ten, a few at most, which may stand behind its box or its
dollars."""

_LATEX_OF_SIGNS = {
    "±": r"\pm ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "≈": "=",
    "°": r"^\circ ",
}
_SIGNS = str.maketrans(_LATEX_OF_SIGNS)
_NAME = re.compile(r"(?<![A-Za-z\\])(pi|log|ln|sin|cos|tan)(?![A-Za-z])")

# --- one number

_NO_UNIT = r"(?:pi|log|ln|sin|cos|tan|sqrt|and|or|to|mod|choose|over|times|plus|minus|negative)\b"
_PARTS = (
    "(?:thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?)(?![ -]grade)"
)
_CHANGED_BY_WORDS_BEFORE = re.compile(
    rf"""
    \b(?:square|cube|cubic|sqrt|squared|cubed|factorials?|logarithms?|log|ln|sin|cos|tan|inverse
        |reciprocal|opposite|negation|double|twice|triple|thrice|half|halves|times|plus|minus
        |negative|not|no|never|neither|nor|except|without|than|below|undefined|modulo|mod
        |(?:roots?|powers?|multiples?|absolute[ ]value|floor|ceiling|{_PARTS})[ ]of)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SAYS_WHAT_IT_IS = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals)(?: (?:about|approximately|roughly|around|nearly|almost"
    r"|exactly|only|just))?|:) *",
    re.IGNORECASE,
)
"""The end of words that name the number, whatever they are: "the square root is"."""
_CHANGED_BY_WORDS_BEHIND = re.compile(
    rf"""
    ^[ ](?:squared|cubed|factorial|radical|(?:square[ ]|cube[ ])?root(?=[ ]\w)|modulo|raised
        |divided|multiplied|out[ ]of|half|halves|{_PARTS}
        |(?:hundred|thousand|million|billion)ths?|tens|{_SCALE}|lakhs?|crores?|mln|bn)\b
    |\b(?:below|hundreds?|thousands?|millions?|billions?|trillions?)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Behind a number it is the word next to it that makes another one of it, as no unit does."""
_UNIT_OF_ONE_LETTER = r"[msghlLACFJKNVW](?=$|[ /.^²³])"
_ONE_NUMBER = re.compile(
    rf"""
    (?P<before>
        (?:[^\W\d_][^\d=+*/^<>\\{{}}()\[\]-]{{0,80}})?\b(?!{_NO_UNIT})[^\W\d_]{{2,}}:?[ ]+
    )?
    (?:[≈~=:][ ]*)?
    (?P<sign>[-+]?)[ ]*
    (?:(?:\\?\$|[€£¥])[ ]*(?P<inner_sign>[-+]?))?
    (?:(?P<whole>\d+)[ ](?=\d+/))?
    (?P<top>(?:[1-9]\d{{0,2}}(?:[, ]\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)
    (?:/(?P<bottom>\d+))?
    (?:[eE](?P<exponent>[-+]?\d{{1,2}}))?
    (?P<percent>[ ]*(?:\\?%|[Pp]ercent(?:age)?\b|[Pp]ct\b))?
    (?P<unit>
        [ ]?°[ ]?[CFK]?
        | [ ]?[€£¥]
        | (?:km|cm|mm|m|ft|mi)/(?:s|h|hr|min)
        | [ ](?!{_NO_UNIT})(?:[^\W\d_]{{2,}}|{_UNIT_OF_ONE_LETTER})
          [^\d=+*<>!;:^\\]{{0,80}}(?:\^\{{?[23]\}}?|[²³])?
    )?
    (?:\.{{0,3}}|…)
    """,
    re.VERBOSE,
)
"""A number alone, or with words or a currency before it, a percent sign or a unit behind it. The
words may still make another number of it."""

# --- formulas

_OPERATORS = ("=", "^", "+", "*", " - ")
_LETTER_ALONE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
"""A variable, or the letter of a choice: no word, unit of two letters or LaTeX command."""
_LONG_WORD = re.compile(r"(?<![A-Za-z\\])(?!sqrt)[A-Za-z]{4,}")
_SHORT_WORD = re.compile(
    r"(?<![A-Za-z\\])(?!and\b|or\b)(?:(?<=[\w)] )[A-Za-z]{2,3}\b|[A-Za-z]{2,3}(?= [\w(]))"
)
"""One that stands beside a number or another word, as no product of variables does."""
_QUOTES = re.compile("[\"'’”]")
"""Feet and inches, minutes and seconds: math-verify drops them and joins the numbers."""
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")


def plain_numbers(text: str) -> str:
    """Return a text with `-` for the minus signs of Unicode, no space or LaTeX between thousands,
    and common spaces for those that do not break."""
    text = text.replace("−", "-")
    text = _DASH_AS_MINUS.sub("-", text)
    text = _SPACE_OF_THOUSANDS.sub("", text)
    for space in _NO_BREAK_SPACES:
        text = text.replace(space, " ")
    return text


def plain_signs(text: str, *, has_factors: bool = True) -> str:
    """Return a text whose numbers are plain, and whose repeating decimals, exponents, roots, mixed
    numbers and percents are such as math-verify reads.

    has_factors: whether words for powers of ten are factors of the number before them."""
    text = plain_numbers(text)
    text = text.replace("²", "^2").replace("³", "^3")
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _ROOT.sub(_latex_of_root, text)
    if has_factors:
        text = _SCALED.sub(_scaled, text)
    text = _MIXED_ALONE.sub(r"\1\\frac{\2}{\3}", text)
    return _FRACTION_OF_PERCENT.sub(_fraction_of_percent, text)


def _fraction_of_repeating(found: re.Match[str]) -> str:
    whole, once, repeated = found.groups()
    all_digits = int(whole + once + repeated)
    not_repeated = int(f"0{whole}{once}")
    bottom = (10 ** len(repeated) - 1) * 10 ** len(once)
    return rf"\frac{{{all_digits - not_repeated}}}{{{bottom}}}"


def _scaled(found: re.Match[str]) -> str:
    if found["decimal"]:
        number = Fraction(found["decimal"].replace(",", ""))
    else:
        number = _mixed_number(found["whole"], found["top"], found["bottom"])
    for scale in found["scales"].lower().split():
        number *= _SCALES[scale.removesuffix("s")]
    return f"{found['open'] or ''}{_latex_of(number)}{found['close']}{found['text'] or ''}"


def _fraction_of_percent(found: re.Match[str]) -> str:
    top = found["top"] or found["short_top"]
    bottom = found["bottom"] or found["short_bottom"]
    return _latex_of(_mixed_number(found["whole"], top, bottom) / 100)


def _mixed_number(whole: str | None, top: str, bottom: str) -> Fraction:
    return int(whole or 0) + Fraction(int(top), int(bottom))


def _latex_of(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _latex_of_root(found: re.Match[str]) -> str:
    return rf"\sqrt{{{found[1] or found[2]}}}"


@lru_cache(maxsize=4096)
def parsed_reference(answer: str) -> list[Any]:
    """Return the readings of a reference answer, for math-verify's `verify`; nothing where it
    cannot be read as a whole."""
    return _parsed_whole(plain_signs(answer).strip())


def parsed_completion(completion: str) -> list[Any]:
    """Return math-verify's reading of a completion; of one that is an answer alone, without `$…$`,
    also the readings that it would have as a reference.

    Words for powers of ten are factors, or else the unit that a reference may leave out."""
    text = plain_signs(completion).strip()
    parsed = _parsed_alone(text)
    with_units = plain_signs(completion, has_factors=False).strip()
    if with_units != text:
        parsed = parsed + _parsed_alone(with_units)
    return parsed


def _parsed_alone(text: str) -> list[Any]:
    parsed = _parsed(text)
    is_one_line = len(text) <= _LONGEST_ANSWER and "\n" not in text
    if is_one_line and not _has_environment(text):
        parsed = parsed + _parsed_whole(text)
    return parsed


def _parsed_whole(answer: str) -> list[Any]:
    if _has_environment(answer):
        return _parsed(answer)
    has_digits = re.search(r"\d", answer) is not None
    number = _ONE_NUMBER.fullmatch(answer)
    if not has_digits:
        parsed = _parsed_without_digits(answer.translate(_SIGNS))
    elif number is not None and _is_changed_by_words(number):
        parsed = []
    elif number is not None:
        parsed = _parsed_number(number)
    else:
        parsed = _parsed_formula(answer)
    if not parsed:
        return []
    return [*parsed, answer]  # what writes the same is right, however math-verify reads that


def _is_changed_by_words(found: re.Match[str]) -> bool:
    """Whether words around a number make another one of it, "square root of 2" or "5 squared", or
    say what it is not."""
    before = (found["before"] or "").rstrip()
    says_what_it_is = any(said.end() == len(before) for said in _SAYS_WHAT_IT_IS.finditer(before))
    if not says_what_it_is and _CHANGED_BY_WORDS_BEFORE.search(before):
        return True
    return _CHANGED_BY_WORDS_BEHIND.search(found["unit"] or "") is not None


def _has_environment(answer: str) -> bool:
    """Whether LaTeX stands in marks of its own: a box, or dollars that are no currency."""
    if "\\boxed" in answer or "\\(" in answer or "\\[" in answer:
        return True
    return re.search(r"(?<!\\)\$(?![ -]*[\d.])", answer) is not None


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=TIMEOUT_S)
    return parsed


def _parsed_latex(latex: str) -> list[Any]:
    """Parse a formula; its text alone where math-verify cannot read it, nothing where it divides by
    zero: all that do are equal to it."""
    from math_verify import LatexExtractionConfig, parse
    from sympy import nan, zoo

    # Without the extraction of numbers, which takes one out of a formula that cannot be read.
    latex_only = [LatexExtractionConfig()]
    parsed: list[Any] = parse(f"${latex}$", extraction_config=latex_only, parsing_timeout=TIMEOUT_S)
    if not parsed or isinstance(parsed[0], str):
        return parsed
    if parsed[0].has(nan, zoo):
        return []
    return parsed


def _parsed_without_digits(latex: str) -> list[Any]:
    if _is_bare_latex(latex):
        return _parsed_latex(latex)
    parsed = _parsed(latex)
    if not parsed and _LETTER_ALONE.search(latex):
        parsed = _parsed_latex(latex)
    return parsed


def _parsed_number(found: re.Match[str]) -> list[Any]:
    number = found["top"].replace(",", "").replace(" ", "")
    if found["exponent"]:
        number += rf"\times 10^{{{found['exponent']}}}"
    if found["bottom"]:
        number = rf"\frac{{{number}}}{{{found['bottom']}}}"
    if found["whole"]:
        number = found["whole"] + number
    if "-" in (found["sign"], found["inner_sign"]):
        number = f"-{number}"
    if found["percent"]:
        number = _FRACTION_OF_PERCENT.sub(_fraction_of_percent, number + r"\%")
    parse: Callable[[str], list[Any]] = _parsed
    if "\\" in number:
        parse = _parsed_latex
    parsed = parse(number)
    if found["unit"]:
        parsed = parsed + _with_unit(found[0])
    return parsed


def _with_unit(answer: str) -> list[Any]:
    """Return how a completion is read that writes the unit into a formula, 5·m/s of "5 m/s";
    nothing where math-verify leaves the unit out there too."""
    parsed = _parsed_latex(answer.translate(_SIGNS))
    if not parsed or isinstance(parsed[0], str) or not parsed[0].free_symbols:
        return []
    return parsed[:1]


def _parsed_formula(answer: str) -> list[Any]:
    latex = answer.translate(_SIGNS)
    latex = _NAME.sub(r"\\\1 ", latex)
    latex = _MIXED.sub(r"\1\\frac{\2}{\3}", latex)
    latex = re.sub(r"(?<!\\)\$", "", latex)
    if not _is_bare_latex(answer) and not _is_formula(latex):
        return []
    has_variables = _LETTER_ALONE.search(latex) is not None or "\\" in latex
    if "=" in latex and not has_variables:
        latex = latex.rpartition("=")[2]
    has_brackets = any(bracket in latex for bracket in "([{")
    joined = _THOUSANDS.sub(_without_commas, latex)
    if not has_brackets and joined != latex:
        if _SEPARATOR.search(joined) is not None:
            return []  # a completion that writes them so is read as a list of other numbers
        latex = joined
    parsed = _parsed_latex(latex)
    has_value = bool(parsed) and not isinstance(parsed[0], str)
    if has_value or "\\" in answer:
        return parsed
    return []


def _is_bare_latex(answer: str) -> bool:
    """Whether an answer is surely a formula without its environment: it has a command, begins with
    a bracket, or has a variable and an operator."""
    if "\\" in answer or answer.startswith(("(", "[", "{")):
        return True
    has_operator = any(operator in answer for operator in _OPERATORS)
    return has_operator and _LETTER_ALONE.search(answer) is not None


def _is_formula(latex: str) -> bool:
    """Whether a text with numbers is a formula, or a list of them, and has no words."""
    has_words = _LONG_WORD.search(latex) is not None or _SHORT_WORD.search(latex) is not None
    has_foreign_signs = not latex.isascii() or _QUOTES.search(latex) is not None
    return not (has_words or has_foreign_signs)


def _without_commas(found: re.Match[str]) -> str:
    return found[0].replace(",", "")
