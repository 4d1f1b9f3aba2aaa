"""Line numbers of TOML keys, which `tomllib` does not keep.

Reads text that `tomllib` has already accepted, so it only has to find keys, not to judge them.
"""

from __future__ import annotations

import re

from grpo_megatron.config.keys import KeyPath

_SPACE = re.compile(r"(?:[\s]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*(?:"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)'|([A-Za-z0-9_-]+))[ \t]*""")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""+|' r"'''.*?'''+|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]*")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Map the path of every key, table and array element of a TOML document to its line.

    Args:
        text: A valid TOML document.

    Returns:
        1-based line numbers. Elements of arrays of tables have integer parts.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str):
        self.text, self.position = text, 0
        self.lines: dict[KeyPath, int] = {}
        self.counts: dict[KeyPath, int] = {}  # elements seen of each `[[array]]`

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip_space()
        while self.position < len(self.text):
            table = self._header() if self._peek() == "[" else self._assignment(table)
            self._skip_space()
        return self.lines

    def _header(self) -> KeyPath:
        line, is_array = self._line(), self.text.startswith("[[", self.position)
        self.position += 2 if is_array else 1
        path: KeyPath = ()
        keys = self._dotted_key()
        for number, key in enumerate(keys, start=1):
            path = (*path, key)
            if is_array and number == len(keys):
                self.lines.setdefault(path, line)
                self.counts[path] = self.counts.get(path, 0) + 1
            if path in self.counts:  # a header below an array means its newest element
                path = (*path, self.counts[path] - 1)
        self.lines.setdefault(path, line)
        self.position += 2 if is_array else 1
        return path

    def _assignment(self, table: KeyPath) -> KeyPath:
        line, path = self._line(), table
        for key in self._dotted_key():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.position += 1  # =
        self._value(path)
        return table

    def _value(self, path: KeyPath) -> None:
        self._skip_space()
        start = self._peek()
        if start in ("[", "{"):
            self._collection(path, closing="]" if start == "[" else "}")
            return
        pattern = _STRING if start in ("'", '"') else _SCALAR
        self.position = pattern.match(self.text, self.position).end()

    def _collection(self, path: KeyPath, *, closing: str) -> None:
        self.position += 1
        index = 0
        self._skip_space()
        while self._peek() != closing:
            if closing == "}":
                self._assignment(path)
            else:
                self.lines[*path, index] = self._line()
                self._value((*path, index))
            index += 1
            self._skip_space()
            self.position += self._peek() == ","
            self._skip_space()
        self.position += 1

    def _dotted_key(self) -> list[str]:
        keys = []
        while True:
            match = _KEY.match(self.text, self.position)
            keys.append(next(group for group in match.groups() if group is not None))
            self.position = match.end()
            if self._peek() != ".":
                return keys
            self.position += 1

    def _skip_space(self) -> None:
        self.position = _SPACE.match(self.text, self.position).end()

    def _peek(self) -> str:
        return self.text[self.position:self.position + 1]

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1
