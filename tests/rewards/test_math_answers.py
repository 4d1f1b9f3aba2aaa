"""Reference answers of math problems, as data sets write them: what a completion must say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_megatron.rewards.functions import math_verify

NUMBERS = r"""
7
-7
+7
0
007
12345
1,234
-1,234
1,234,567
1,234.56
0.5
.5
5.
-1.5
0.333...
50%
50\%
3rd
10cm
75mph
$5
\$5
€5
$1,234
$5.50
-$17
$-17
1/2
-1/2
9/16
90°
120^\circ
90^{\circ}
1.5e10
12 percent
5 apples
5 m
5 m/s
12 cm^2
12 cm²
5 miles per hour
90 degrees
1,000 apples
3/5 cups
1/2 hour
5\text{ cm}
5 \text{ cm}^2
\frac{3}{4}\text{ mile}
about 5
≈ 3.14
x is 3
The answer is 5
$5 per hour
""".strip().splitlines()
EXPRESSIONS = r"""
\frac{1}{2}
\frac12
-\frac{3}{4}
\dfrac{3}{4}
\frac{\sqrt{3}}{2}
\sqrt{8}
2\sqrt{2}
sqrt(2)
√2
2√3
2^{10}
2^10
10^{-3}
5!
n!
\binom{5}{2}
2:3
25:36
1:2:3
2+3
5-3
2*3
3x
2xy
x^2
2x+3
a+b
x
2^n
2^{n}-1
\pi
2\pi
π
2π
25\pi\text{cm}^2
pi/4
3+4i
6-5i
-i
(x+1)(x-2)
n(n+1)/2
|x|
e^2
e^{x}
\ln2
\log_23
1\frac{1}{2}
0.\overline{3}
1011_2
2516_8
1011_{2}
4,\!000
1\,000
1.5\times10^3
\infty
-\infty
B
(A)
\text{(B)}
\text{Evelyn}
\textbf{(C)}
\emptyset
1,234x
1 1/2
2 3/4
1.5 × 10^3
3 \times 10^8
25 pi
log 2
xy + 3
""".strip().splitlines()
COLLECTIONS = r"""
3,5,7
1,2,3
-2,1
1,-2
1;2
12,34
2,3
(1,2)
(1,2,3)
[1,2)
(0,1]
\{1,2,3\}
{1,2,3}
±5
3, 5, 7
-1, 1
1; 2
3 and 5
3 or 5
1, 2, and 3
1/2, 1/3
\frac{1}{2}, \frac{1}{3}
\pm 5
1 \pm \sqrt{2}
1+\sqrt{2},1-\sqrt{2}
(3,4), (5,6)
$5 and $6
(-\infty, 2] \cup [3, \infty)
(-\infty,-2)∪(3,∞)
\left( \frac{1}{2}, \frac{3}{4} \right)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}
\boxed{3, 5, 7}
""".strip().splitlines()
RELATIONS = r"""
x=3
x = 3 or x = 5
x=3, y=4
y = 2x + 3
x^2+y^2=1
f(x) = x^2
x>3
1 < x
0 < x < 1
x \ge 3
x ≥ 3
x < -1 or x > 2
x\in[0,1]
3 + 2 = 5
""".strip().splitlines()


@pytest.mark.parametrize("answer", NUMBERS + EXPRESSIONS + COLLECTIONS + RELATIONS)
def test_an_answer_matches_itself(answer):
    assert math_verify(f"So it is $\\boxed{{{answer}}}$.", answer) == 1
    assert math_verify(answer, answer) == 1
    assert math_verify("$\\boxed{987}$", answer) == 0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("3, 5, 7", "7,5,3", "7"),
        ("-2,1", "1,-2", "-2.1"),
        ("3,5,7", "7, 3, 5", "3.5"),
        ("1,-2", "-2, 1", "1"),
        ("1;2", "1, 2", "2"),
        ("3 and 5", "\\{3, 5\\}", "5"),
        ("1, 200", "200, 1", "1200"),
        ("2^{10}", "1024", "2"),
        ("10^{-3}", "0.001", "10"),
        ("5!", "120", "5"),
        ("2:3", "\\frac{2}{3}", "2"),
        ("1 1/2", "\\frac{3}{2}", "1"),
        ("-1 1/2", "-1.5", "-1"),
        ("2 3/4 cups", "\\frac{11}{4}", "2"),
        ("±5", "5, -5", "5"),
        ("−5", "-5", "5"),
        ("–5", "-5", "5"),
        ("-5", "−5", "5"),
        ("−1,234", "-1234", "-1"),
        ("-$17", "-17", "17"),
        ("3\u202f000", "3000", "0"),
        ("3\u00a0000", "3\\,000", "0"),
        ("3 000", "3000", "3"),
        ("1\\,000", "1000", "0"),
        ("1,234", "1234", "\\{1, 234\\}"),
        ("1,234x", "1234x", "1, 234x"),
        ("x = 1,234", "1234", "234"),
        ("110\\,101_2", "110101_2", "211"),
        ("0.\\overline{3}", "\\frac{1}{3}", "0"),
        ("1.1\\overline{6}", "\\frac{7}{6}", "1.1"),
        ("1.5e10", "15000000000", "1.5"),
        ("1.5 × 10^3", "1500", "10"),
        ("50%", "\\frac{1}{2}", "5"),
        ("2√3", "\\sqrt{12}", "2"),
        ("2π", "2\\pi", "2"),
        ("25 pi", "25\\pi", "25"),
        ("log 2", "\\log 2", "2"),
        ("3x", "3x", "3"),
        ("6-5i", "6 - 5i", "6"),
        ("0 < x < 1", "(0, 1)", "1"),
        ("5 m/s", "5 \\text{ m/s}", "6"),
        ("12 cm^2", "12\\text{ cm}^2", "144"),
        ("5 apples", "5", "6"),
        ("3 + 2 = 5", "5", "3"),
        ("3.5 million", "3500000", "3.5"),
        ("3.5 million", "3.5 \\times 10^6", "3500"),
        ("3.5 million", "3.5 million", "3.5 billion"),
        ("3.5 million", "3.5\\text{ million}", "3.5"),
        ("3.5 Million", "3.5~\\text{million dollars}", "3.5"),
        ("$5 million", "5{,}000{,}000", "5"),
        ("$5 million", "\\$5\\text{ million}", "\\$5"),
        ("-2 million dollars", "-2000000", "-2"),
        ("about 5 hundred thousand people", "500000", "500"),
        ("2 dozen eggs", "24", "2"),
        ("1,200 dozen", "14400", "1200"),
        ("5 thousand", "5,000", "5"),
        ("1/2 million", "500000", "1/2"),
        ("2 1/2 million", "2500000", "2"),
        ("1/3 dozen", "4", "1/3"),
        ("x = 2 million", "2000000", "2"),
        ("$3.5$ million", "3500000", "3.5"),
        ("5 dollars per dozen", "5", "60"),
        ("7 1/2%", "7.5\\%", "7"),
        ("7 1/2%", "7\\frac12\\%", "7.5"),
        ("7\\frac{1}{2}\\%", "0.075", "7"),
        ("-7 1/2%", "-7.5\\%", "7.5\\%"),
        ("12 1/2 percent", "12.5\\%", "12"),
        ("1/2%", "0.5\\%", "1/2"),
        ("33 1/3%", "\\frac{1}{3}", "33"),
        ("0.5%", "\\frac{1}{2}\\%", "\\frac{1}{2}"),
        ("the square root is 5", "5", "25"),
        ("It is not prime: 5", "5", "25"),
        ("5 square meters", "5", "25"),
        ("5 meters squared", "5", "25"),
        ("2 real roots", "2", "4"),
        ("5 seconds", "5", "6"),
        ("5 months", "5", "6"),
        ("5 widths", "5", "6"),
        ("a total of 5", "5", "6"),
        ("Section 5", "5", "6"),
        ("at least 5 people", "5", "6"),
        ("12 fifth graders", "12", "5"),
        ("12 fifth-grade students", "12", "12/5"),
    ],
)
def test_what_an_answer_means(answer, right, wrong):
    assert math_verify(f"$\\boxed{{{right}}}$", answer) == 1
    assert math_verify(f"$\\boxed{{{wrong}}}$", answer) == 0


@pytest.mark.parametrize(
    "answer",
    [
        "5 hours and 30 minutes",
        "2 hours 30 minutes",
        "5 feet 6 inches",
        "5'6\"",
        "3:30 PM",
        "12:00",
        "5 choose 2",
        "7 (mod 10)",
        "10 to the power of 3",
        "negative 5",
        "minus 5",
        "1,000, 2,000",
        "1,234, 5",
        "1/0",
        "5 ⊕ 3",
        "even",
        "square root of 5",
        "sqrt of 5",
        "cube root of 5",
        "a square root of 5",
        "5 squared",
        "5 cubed",
        "5 factorial",
        "5 root two",
        "5 square root of two",
        "5 raised to the power of two",
        "5 out of ten",
        "5 halves",
        "5 thirds",
        "5 hundredths",
        "5 thousandths",
        "5 tenths of a mile",
        "5 per hundred",
        "5 crore",
        "5 million-dollar houses",
        "2 thousand five hundred",
        "1,5 million",
        "5-6 million",
        "1.5e3 million",
        "10^5 million",
        "1/0 million",
        "twice 5",
        "half of 5",
        "one half of 5",
        "a third of 5",
        "5 fifths",
        "log of 5",
        "factorial of 5",
        "reciprocal of 5",
        "5 degrees below zero",
        "not 5",
        "x is not 5",
        "all x except 5",
        "less than 5",
        "undefined at 5",
    ],
)
def test_what_is_no_single_value_cannot_be_scored(answer):
    for completion in ("$\\boxed{5}$", "$\\boxed{2}$", answer):
        np.testing.assert_equal(math_verify(completion, answer), math.nan)


def test_a_word_for_a_power_of_ten_may_stand_behind_the_box():
    for completion in (
        "So $\\boxed{3.5}$ million.",
        "So $\\boxed{\\$3.5}$ million dollars.",
        "3.5 million",
    ):
        assert math_verify(completion, "3.5 million") == 1
        assert math_verify(completion, "3500000") == 1
        assert math_verify(completion, "3.5 billion") == 0
    assert math_verify("In 5 million years it is $\\boxed{3.5}$.", "3.5") == 1
    assert math_verify("$\\boxed{\\frac{1}{2}}$, a million times", "1/2") == 1


@pytest.mark.parametrize(
    "completion",
    ["So $\\boxed{3}$ dozen eggs.", "\\boxed{3\\text{ million}}", "It sells 3 million.", "3 dozen"],
)
def test_a_word_for_a_power_of_ten_may_be_the_unit_that_an_answer_leaves_out(completion):
    """Where the question asks how many dozen."""
    assert math_verify(completion, "3") == 1
    assert math_verify(completion, "4") == 0


@pytest.mark.parametrize("start", ["3", "$\\boxed{3}$", "1/2"])
def test_words_for_powers_of_ten_without_end_are_read(start):
    """As of a policy that repeats itself."""
    assert math_verify(start + " trillion" * 500, "7") == 0


@pytest.mark.parametrize("answer", ["2^{10}", "3, 5, 7", "1 1/2", "5!"])
def test_answers_in_tags_need_no_box(answer):
    completion = f"<answer>{answer}</answer>"
    assert math_verify(completion, answer, answer_tag="answer") == 1
    assert math_verify("<answer>7</answer>", answer, answer_tag="answer") == 0


def test_a_long_answer_is_read_in_no_time():
    words = "so it is " * 2000
    assert math.isnan(math_verify("5", f"{words}5 or 6"))
    assert math_verify("5", "9" * 3000) == 0
