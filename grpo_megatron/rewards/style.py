"""How a completion is written: its blocks and its language."""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.registry import needs

_UNSPACED = {"han", "hiragana", "katakana", "khmer", "lao", "myanmar", "thai", "tibetan"}
_NOT_PROSE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)"
                        r"|\\\[.*?\\\]|\\[a-zA-Z]+", re.DOTALL)


def extract(completion: str, tag: str | None) -> str | None:
    """The last closed `<tag>…</tag>`'s content; None where there is none; all without a tag."""
    if tag is None:
        return completion
    head, closed, _ = completion.rpartition(f"</{tag}>")
    _, opened, content = head.rpartition(f"<{tag}>")
    return content if closed and opened else None


def format_tags(completion: str, answer: str, *, think_tag: str = "think",
                answer_tag: str = "answer", opened: bool = False) -> float:
    """1 for exactly one think block, then exactly one answer block, neither empty, with nothing but
    white space outside (DeepSeek-R1, arXiv:2501.12948); else 0. `opened`: the prompt already ends
    with the opening think tag."""
    text = f"<{think_tag}>{completion}" if opened else completion
    tags = re.escape(think_tag), re.escape(answer_tag)
    blocks = re.fullmatch(r"\s*<{0}>(.*)</{0}>\s*<{1}>(.*)</{1}>\s*".format(*tags), text, re.DOTALL)
    once = all(len(re.findall(f"<{tag}>|</{tag}>", text)) == 2 for tag in tags)
    return float(once and blocks is not None and all(map(str.strip, blocks.groups())))


def _check(*, scripts: Sequence[str] = ("latin",), **_: object) -> None:
    known = set(map(_script, map(chr, range(0x20000))))
    if isinstance(scripts, str) or not known.issuperset(scripts):
        raise RewardError(f"scripts = {scripts!r} is not a list of Unicode scripts",
                          remedy='for example ["latin"], ["cyrillic"] or ["han"]')


@needs(check=_check)
def language_consistency(completion: str, answer: str, *, scripts: Sequence[str] = ("latin",),
                         think_tag: str | None = "think") -> float:
    """Words of the target language / words of the chain of thought (DeepSeek-R1,
    arXiv:2501.12948), in [0, 1]; 0 without a word. Code and LaTeX do not count.

    A word is a run of letters of one Unicode script, or one letter of a script that puts no
    spaces between words. The script stands for the language: English and French are both
    `latin`; Japanese is `["han", "hiragana", "katakana"]`. The chain of thought is the block
    `think_tag`, or everything."""
    if think_tag:  # a block that the prompt opened, or that nothing closed, counts too
        completion = completion.partition(f"</{think_tag}>")[0].rpartition(f"<{think_tag}>")[2]
    prose = _NOT_PROSE.sub(" ", completion)
    words, matching, previous = 0, 0, None
    for letter in unicodedata.normalize("NFKC", prose):
        if letter in "'’" or unicodedata.category(letter).startswith("M"):
            continue  # inside of a word
        script = _script(letter)
        if script and (script != previous or script in _UNSPACED):
            words += 1
            matching += script in scripts
        previous = script
    return matching / words if words else 0.0


@lru_cache(maxsize=8192)
def _script(letter: str) -> str | None:
    """Script of a letter, by its Unicode name; None for what is no letter."""
    name = unicodedata.name(letter, "").partition(" ")[0].lower() if letter.isalpha() else ""
    return {"cjk": "han", "": None}.get(name, name)
