"""Language consistency: what counts as a word, and of which language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.rewards.functions import language_consistency

SCRIPTS = ("arabic", "cyrillic", "greek", "han", "hangul", "hiragana", "katakana", "latin", "thai")


@pytest.mark.parametrize(
    ("completion", "scripts", "share"),
    [
        ("two words", ["latin"], 1),
        ("two слова", ["latin"], 1 / 2),
        ("два слова", ["cyrillic"], 1),
        ("don't l’été naïve", ["latin"], 1),
        ("so 三个字", ["latin"], 1 / 4),
        ("so 三个字", ["han"], 3 / 4),
        ("漢字とカナ", ["han", "hiragana", "katakana"], 1),
        ("안녕 hello", ["hangul"], 1 / 2),
        ("ＦＵＬＬ width", ["latin"], 1),
        ("", ["latin"], 0),
        ("12 + 3 = 15 ✓", ["latin"], 0),
        ("mixedслово", ["latin"], 1 / 2),
        ("слово ```python\nx = 1\n``` `y`", ["cyrillic"], 1),
        ("слово ```x = 1", ["cyrillic"], 1),
        (r"слово $x+y$ $$\int$$ \(a\) \[b\] \alpha", ["cyrillic"], 1),
        ("нет <think>yes</think>нет", ["latin"], 1),
        ("yes</think>нет", ["latin"], 1),
        ("<think>yes", ["latin"], 1),
        ("γράμμα", ["greek"], 1),
        ("สวัสดี", ["thai"], 1),
        ("नमस्ते दुनिया", ["devanagari"], 1),
        ("नमस्ते दुनिया hello", ["latin"], 1 / 3),
    ],
)
def test_share_of_words(completion, scripts, share):
    assert language_consistency(completion, "", scripts=scripts) == share


def test_the_tag_may_have_another_name_or_none():
    text = "<r>yes</r>нет"
    assert language_consistency(text, "", think_tag="r") == 1
    assert language_consistency("yes</think>нет", "", think_tag=None) == 2 / 3


@given(st.text())
def test_shares_of_all_scripts_add_up_to_one_at_most(text):
    shares = [language_consistency(text, "", scripts=[script]) for script in SCRIPTS]
    assert all(0 <= share <= 1 for share in shares) and sum(shares) <= 1 + 1e-9
    assert language_consistency(text, "", scripts=SCRIPTS) == pytest.approx(sum(shares))
