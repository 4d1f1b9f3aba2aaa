"""What an environment says is any text: results of tools, pages, output of programs. Here it
becomes one that a tokenizer takes and a policy can read."""

import re

REPLACEMENT = "\ufffd"
_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tab and the ends of lines, and halves of surrogate pairs, which no
encoding of text has."""


def cleaned(text: str) -> str:
    """Return the text with U+FFFD for every control character and every lone surrogate."""
    return _UNREADABLE.sub(REPLACEMENT, text)


def cut(text: str, characters: int | None) -> str:
    """Return the text; of one that is too long the beginning, how much was left out, and the end.
    None: no limit."""
    if characters is None or len(text) <= characters:
        return text
    left_out = len(text) - characters
    mark = f"\n[… {left_out} characters left out …]\n"
    head = (characters + 1) // 2
    tail = characters - head
    return text[:head] + mark + text[len(text) - tail :]
