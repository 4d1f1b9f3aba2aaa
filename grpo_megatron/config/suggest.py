"""Did you mean: the nearest valid word."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Known words like `word`, best first; letter case and `-` against `_` do not count."""
    if len(word) <= 3:  # one wrong letter of two is half of the word
        cutoff = min(cutoff, 0.5)
    matcher = difflib.SequenceMatcher(b=plain(word), autojunk=False)

    def is_close(candidate: str) -> bool:
        matcher.set_seq1(plain(candidate))
        if matcher.real_quick_ratio() < cutoff or matcher.quick_ratio() < cutoff:
            return False  # both are upper bounds, and cheap
        return matcher.ratio() >= cutoff

    def likeness(candidate: str) -> tuple[float, float]:
        matcher.set_seq1(plain(candidate))
        return matcher.ratio(), matcher.quick_ratio()  # the second decides `bet1a` for beta1

    close = [candidate for candidate in known if is_close(candidate)]
    return sorted(close, key=likeness, reverse=True)[:count]  # stable: ties keep their order


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, or all that there is."""
    known = list(known)
    close = " or ".join(map(repr, nearest(word, known)))
    if close:
        return f"did you mean {close}?"
    return f"there are: {', '.join(known) or 'none'}"


def plain(word: str) -> str:
    """`word` in lower case, with `_` for `-`."""
    return word.lower().replace("-", "_")
