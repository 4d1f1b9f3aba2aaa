"""Line numbers of TOML keys, which `tomllib` does not keep.

Reads text that `tomllib` has already accepted, so it only has to find keys, not to judge them.
"""

import re
from collections import Counter, deque
from typing import NamedTuple

from grpo_megatron.config.keys import KeyPath

_TOKEN = re.compile(r'''\#[^\n]* | (
    """(?:\\.|[^\\])*?"""+ | \'\'\'.*?\'\'\'+ | "(?:\\.|[^"\\\n])*" | '[^'\n]*'
    | [^\s,=\[\]{}\#"'.]+ | [,=\[\]{}.] )''', re.DOTALL | re.VERBOSE)


class _Token(NamedTuple):
    text: str
    line: int

    @property
    def name(self) -> str:
        return self.text[1:-1] if self.text[0] in "\"'" else self.text


def key_lines(text: str) -> dict[KeyPath, int]:
    """Map the path of every key, table and array element of a TOML document to its line.

    Args:
        text: A valid TOML document.

    Returns:
        1-based line numbers. Elements of arrays of tables have integer parts.
    """
    tokens = deque(_Token(match[1], text.count("\n", 0, match.start()) + 1)
                   for match in _TOKEN.finditer(text) if match[1])
    lines: dict[KeyPath, int] = {}
    sizes: Counter[KeyPath] = Counter()  # elements seen of each `[[array]]`
    table: KeyPath = ()
    while tokens:
        if tokens[0].text == "[":
            table = _header(tokens, lines, sizes)
        else:
            _pair(tokens, table, lines)
    return lines


def _header(tokens: deque[_Token], lines: dict[KeyPath, int], sizes: Counter[KeyPath]) -> KeyPath:
    brackets = 2 if tokens[1].text == "[" else 1
    _skip(tokens, brackets)
    path: KeyPath = ()
    names = _dotted_key(tokens)
    for name in names:
        path = (*path, name.name)
        if brackets == 2 and name is names[-1]:
            lines.setdefault(path, name.line)
            sizes[path] += 1
        if path in sizes:  # a header below an array means its newest element
            path = (*path, sizes[path] - 1)
    lines.setdefault(path, names[0].line)
    _skip(tokens, brackets)
    return path


def _pair(tokens: deque[_Token], path: KeyPath, lines: dict[KeyPath, int]) -> None:
    for name in _dotted_key(tokens):
        path = (*path, name.name)
        lines.setdefault(path, name.line)
    _skip(tokens, 1)  # =
    _value(tokens, path, lines)


def _value(tokens: deque[_Token], path: KeyPath, lines: dict[KeyPath, int]) -> None:
    first, index = tokens.popleft(), 0
    if first.text not in ("[", "{"):  # a number or a date may have several tokens
        while tokens and tokens[0].line == first.line and tokens[0].text not in (",", "]", "}"):
            tokens.popleft()
        return
    while tokens[0].text not in ("]", "}"):
        if first.text == "{":
            _pair(tokens, path, lines)
        else:
            lines[*path, index] = tokens[0].line
            _value(tokens, (*path, index), lines)
        index += 1
        _skip(tokens, tokens[0].text == ",")
    _skip(tokens, 1)


def _dotted_key(tokens: deque[_Token]) -> list[_Token]:
    names = [tokens.popleft()]
    while tokens[0].text == ".":
        tokens.popleft()
        names.append(tokens.popleft())
    return names


def _skip(tokens: deque[_Token], count: int) -> None:
    for _ in range(count):
        tokens.popleft()
