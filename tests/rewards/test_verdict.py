"""Lines of a judge's verdict: which say a score, and which score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.rewards.verdict import scores_of, verdict_of

CLEAR = {
    "1: 8": 8,
    "1:8": 8,
    "1 : 8": 8,
    "1: 0": 0,
    "1: 10": 10,
    "1: 07": 7,
    "1: 0.5": 0.5,
    "1: 10.0": 10,
    "1: 8.": 8,
    "1: 8!": 8,
    "1: 8\r": 8,
    "- 1: 8": 8,
    "# 1: 8": 8,
    "[1]: 8": 8,
    "(1): (8)": 8,
    "1: [8]": 8,
    "**1: 8**": 8,
    "**1:** 8": 8,
    "**1**: **8**": 8,
    '"1": 8,': 8,
    '{"1": "8"}': 8,
    "| 1 |: 8 |": 8,
    "```\n1: 8\n```": 8,
    "1: 8/10": 8,
    "1: 8 / 10.": 8,
    "1: **8**/10": 8,
    "1: **8/10**": 8,
    "1: (8/10, weak)": 8,
    "1: 8/10.0": 8,
    "1: 8 of 10": 8,
    "1: 8 out of 10": 8,
    "1: **8** out of **10**": 8,
    "1: 8 Out of 10 (weak)": 8,
    "1: 8 (out of 10)": 8,
    "1: **8** [/10]": 8,
    "1: 8, out of 10": 8,
    "1: 8 - of 10": 8,
    "1: 2\n1: 8 (out of 10 facts are there)": 2,
    "1: 8 (8/10)": 8,
    "1: 8 (80%)": 8,
    "1: 8 (4/5, weak)": 8,
    "1: 7 (2 of 3)": 7,
    "1: 0 (0 %)": 0,
    "1: 8 (80% of the facts)": 8,
    "1: 8 (3/5 facts)": 8,
    "1: 8/10 (3/5)": 8,
    "1: 8 (2 + 6)": 8,
    "1: 8 - of course": 8,
    "1: 8. Of 3 facts none is wrong.": 8,
    "1: 8 (weak)": 8,
    "1: 8 (3 of 5 facts)": 8,
    "1: 8, as it lacks a proof": 8,
    "1: 8. It lacks a proof of 2.": 8,
    "1: 8 - weak": 8,
    "1: 8 — weak": 8,
    "1: 8: weak": 8,
    "1: 8; weak": 8,
    "1: 8\n1: 2": 2,
    "1: 8 (weak)\n1: 2 (weaker)": 2,
    "1: 2\n1: 8 (at first)": 2,
    "1: 2\n1: 10 would need a proof": 2,
    "1: 2 (weak)\n1: 10 would need a proof": 2,
    "1: 2\n1: 8 out of 10 facts are there": 2,
    "1: 2\n1: not met, 0": 2,
    "1: 2\n1:": 2,
    "1: 3-8\n1: 4": 4,
    "1: 3-8\n1: 4 (between)": 4,
    "11: 3\n1: 8": 8,
    "1: 8\n\nExample 1: 2 apples": 8,
}
NOT_CLEAR = [
    "",
    "1:",
    "1:\n8",
    "1: ten",
    "1: N/A",
    "1: not met, 0",
    "1: .5",
    "1: 4/5",
    "1: 8/100",
    "1: 10/1",
    "1: 8/x",
    "1: 8/10/10",
    "1: 8/10.5",
    "1: 4 out of 5",
    "1: 4 of 5",
    "1: 4 (out of 5)",
    "1: 4 (/5)",
    "1: 4 (of 5)",
    "1: 4 [out of 5]",
    "1: 4 (out of 5 points)",
    "1: **4** (out of 5)",
    "1: **4** (**out of** 5)",
    "1: 4, out of 5",
    "1: 4 - out of 5",
    "1: 4 — /5",
    "1: 4: of 5",
    "1: 4 (4/5)",
    "1: 4 (4 of 5)",
    "1: 4 [4 out of 5, weak]",
    "1: 4 **(4/5 = 0.8)**",
    "1: 4 (80%)",
    "1: 4 (80 %)",
    "1: 4 (4/0)",
    "1: 8 (7.4/10)",
    "1: 1e1",
    "1: 8x",
    "1: 8,5",
    "1: 8, 5",
    "1: 8.5.1",
    "1: 3-8",
    "1: 3 - 8",
    "1: 3–8",
    "1: 3 to 8",
    "1: 10 or 1",
    "1: 3:8",
    "1: 3 8",
    "1: 5%",
    "1: 80%",
    "1: <2",
    "1: >=7",
    "1: ~8",
    "1: +8",
    "1: 8+",
    "1: -0",
    "1: -3",
    "1: −3",
    "1: 8?",
    "1: 11",
    "1: 10.5",
    "1: " + "9" * 5000,
    "1: 0 errors, so 10",
    "1: 2 steps are missing, but overall 9",
    "1: 8 | 2: 9",
    "1: 8, 2: 9",
    "2 criteria, 1: 8",
    "Time 1:30",
    "1) 8",
    "1. 8",
    "Score 1: 8",
    "1" * 5000 + ": 8",
    "1: 8\n1: 4/5",
    "1: 8\n1: 11",
    "1: 8 (weak)\n1: 3-8",
]


@pytest.mark.parametrize(("line", "score"), CLEAR.items())
def test_lines_that_say_a_score(line, score):
    assert scores_of(line, 1) == [score]


@pytest.mark.parametrize("line", NOT_CLEAR)
def test_lines_that_say_no_score_or_not_clearly_which(line):
    assert scores_of(line, 1) == []


def test_every_criterion_needs_a_score_in_whatever_order():
    assert scores_of("2: 9\n1: 8", 2) == [8, 9]
    assert scores_of("2: 9", 2) == scores_of("1: 8\n2: 4/5", 2) == []


@given(st.text("123: 0/.,-*()|\nofa", max_size=40))
def test_scores_are_always_in_their_range(text):
    for score in scores_of(text, 1):
        assert 0 <= score <= 10


@pytest.mark.parametrize(
    ("reply", "is_cut", "verdict"),
    [
        ("1: 8", False, "1: 8"),
        ("<think>1: 3</think>1: 8", False, "1: 8"),
        ("1: 3</think>1: 8", False, "1: 8"),
        ("<think>1: 3", False, ""),
        ("1: 8\nIts <think> is never closed.", False, "1: 8\nIts "),
        ("foo <think>\n1: 3", False, "foo "),
        ("<think>a</think>1: 8\n<think>\n1: 3", False, "1: 8\n"),
        ("1: 8", True, ""),
        ("<think>a</think>1: 8\n2: 1", True, "1: 8"),
    ],
)
def test_a_thought_is_no_verdict_also_where_it_does_not_end(reply, is_cut, verdict):
    assert verdict_of(reply, is_cut=is_cut) == verdict


@pytest.mark.parametrize(
    "long",
    ["\n", "\n ", "\n- ", " ", ":", "*", "1", "1:", "1: ", "1: 8 ", "\n1", "(", ", ", "/", "of "],
)
def test_a_judge_that_repeats_itself_is_read_in_one_pass(long):
    """Time that grows with the square of the length would be hours here."""
    text = long * 500_000
    assert scores_of(text + "\n1: 7", 1) == [7]
    for begin in ("1:", "1: 8", "1: 8 (8", "1: 8 (8/5"):
        assert scores_of(begin + text + "\n1: 7", 1) == [7]
