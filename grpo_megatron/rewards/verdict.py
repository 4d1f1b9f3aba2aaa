"""What a judge's reply says: one score from 0 to 10 for each criterion, or nothing that is clear.

The grammar of a line of the verdict, with white space and marks (`*`, `_`, quotes, brackets) around
its parts:

    line    = number ":" score [scale] [comment]
    score   = digits ["." digits]                  from 0 to 10
    scale   = ["," | ";" | ":" | dash] ("/" | "of" | "out of") "10"
    comment = "(" anything
            | ("," | ";" | ":" | "." | "!" | dash) anything that does not begin with a number

A comment in brackets that begins with the score on a scale of its own (`4 (80%)`, `4 (4/5)`) has to
agree with the score, up to rounding.

A line that has words right behind its score (`2: 10 would need a proof`), or words in place of one,
is prose and says nothing. Any other (`4/5`, `8,5`, `3-8`, `5%`, `<2`, `11`) is meant as a score,
but it is not clear as which: what its criterion had before does not count any more either."""

import re
from typing import Literal

_END_OF_THOUGHT = "</think>"
_BEGIN_OF_THOUGHT = "<think>"
_BEST = 10.0
_OPENING = " \t\r*_`\"'“‘([{|"
_CLOSING = " \t\r*_`\"'”’)]}|"
_NUMBERED = re.compile(r"[^\w\n]*(?P<number>\d{1,6})[^\w\n]*:(?P<said>.*)")
_NUMBER = r"\d+(?:\.\d+)?"
_SCALE = rf"(?:/|(?:out\s+)?of\b)[{re.escape(_OPENING)}]*(?P<best>{_NUMBER})"
_SCORE = re.compile(
    rf"(?P<score>{_NUMBER})(?:[{re.escape(_OPENING + _CLOSING)},;:–—−-]*{_SCALE})?",
    re.IGNORECASE,
)
_RESTATED = re.compile(
    rf"[(\[{{][{re.escape(_OPENING)}]*(?P<score>{_NUMBER})"
    rf"[{re.escape(_CLOSING)}]*+(?:%|{_SCALE})(?!\.?\d|[{re.escape(_CLOSING)}]*+\w)",
    re.IGNORECASE,
)
"""A comment that begins with a score and its scale. Words behind them (`3 of 5 facts`) make them
what was counted, not the score."""
_ROUNDED_BY = 0.5
_COMMENT = re.compile(r"[,;:.!…–—−-](?!\W*\d)|[(\[{]")
"""How a comment begins. A number behind the comma, point, colon or dash would make the score half
of a decimal number, of a range or of a list."""
_NUMBER_BEHIND_MARKS = re.compile(r"\W*\d")
_Reading = Literal["alone", "commented", "unclear", "prose"]


def verdict_of(reply: str, *, is_cut: bool) -> str:
    """Return what a judge says behind its thought, and before one that does not end; nothing where
    `max_tokens` has cut the reply (`is_cut`) within its only thought."""
    _, end_of_thought, verdict = reply.rpartition(_END_OF_THOUGHT)
    if is_cut:
        if not end_of_thought:
            return ""
        verdict = verdict.rpartition("\n")[0]  # its last line is not whole
    return verdict.partition(_BEGIN_OF_THOUGHT)[0]


def scores_of(verdict: str, num_criteria: int) -> list[float]:
    """Return one score in [0, 10] for each criterion, in order; empty where one has none.

    The last line of a criterion counts that has nothing but its score, else the last one with a
    comment."""
    alone: dict[int, float] = {}
    commented: dict[int, float] = {}
    for line in verdict.split("\n"):
        found = _NUMBERED.match(line)
        if found is None:
            continue
        number = int(found["number"])
        reading, score = _read(found["said"].lstrip(_OPENING))
        if reading == "alone":
            alone[number] = score
        elif reading == "commented":
            commented[number] = score
        elif reading == "unclear":
            alone.pop(number, None)
            commented.pop(number, None)
    by_number = commented | alone
    scores = []
    for number in range(1, num_criteria + 1):
        if number not in by_number:
            return []
        scores.append(by_number[number])
    return scores


def _read(said: str) -> tuple[_Reading, float]:
    """Return how a line of the verdict is to be read, from its score on, and the score, if any."""
    found = _SCORE.match(said)
    if found is None:
        if _NUMBER_BEHIND_MARKS.match(said):
            return "unclear", 0.0
        return "prose", 0.0
    score = float(found["score"])
    if score > _BEST or float(found["best"] or _BEST) != _BEST:
        return "unclear", score
    behind = said[found.end() :]
    comment = behind.lstrip(_CLOSING)
    if comment[:1].isalpha() and comment != behind:
        return "prose", score
    if comment and not _COMMENT.match(comment):
        return "unclear", score
    if found["best"] is None and _is_contradicted(score, comment):
        return "unclear", score
    if re.search(r"\w", comment):
        return "commented", score
    return "alone", score


def _is_contradicted(score: float, comment: str) -> bool:
    """Return whether a comment begins with the score on another scale, which would be another
    score of 10."""
    restated = _RESTATED.match(comment)
    if restated is None:
        return False
    best = float(restated["best"] or 100.0)
    if best == 0:
        return True
    share = float(restated["score"]) / best
    is_same = abs(_BEST * share - score) <= _ROUNDED_BY
    return not is_same
