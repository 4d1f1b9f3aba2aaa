"""Did you mean: the nearest valid word."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Known words like `word`, best first; letter case and `-` against `_` do not count."""
    if len(word) <= 3:  # one wrong letter of two is half of the word
        cutoff = min(cutoff, 0.5)
    matcher = difflib.SequenceMatcher(b=plain(word), autojunk=False)
    scored = []
    for candidate in known:
        matcher.set_seq1(plain(candidate))
        same_letters = matcher.quick_ratio()  # in any order: decides `bet1a` for beta1
        if same_letters >= cutoff and matcher.ratio() >= cutoff:
            scored.append((matcher.ratio(), same_letters, candidate))
    scored.sort(key=lambda entry: entry[:2], reverse=True)  # stable: ties keep their order
    return [candidate for _, _, candidate in scored[:count]]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, or all that there is."""
    known = list(known)
    close = " or ".join(map(repr, nearest(word, known)))
    return f"did you mean {close}?" if close else f"there are: {', '.join(known) or 'none'}"


def plain(word: str) -> str:
    return word.lower().replace("-", "_")
