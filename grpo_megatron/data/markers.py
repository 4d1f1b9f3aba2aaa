"""Markers: tokens that a tokenizer finds in a text before it cuts the rest, such as <|im_end|>.

A chat template writes them. In what the environment says they are text: `Markers.escape` puts a
character into them by which `Markers.encode` knows to cut the text there, so that no marker is
found. The ids that come out are those of the text as it is; the character is in none of them."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tokenizers import AddedToken

from grpo_megatron.data.environment_text import REPLACEMENT
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError

ESCAPE = "\ufdd1"
"""A noncharacter: no text of a person or a program has it. Where one does, it becomes U+FFFD."""
_OPENING = "<["
_CLOSING = ">]"


class Seam(NamedTuple):
    """Where a marker begins. Ids on both sides do not depend on each other: what stands behind a
    seam has the same ids whatever stands in front of it."""

    character: int
    token: int


class EncodedText(NamedTuple):
    """The ids of a text, and its seams in order."""

    token_ids: tuple[int, ...]
    seams: tuple[Seam, ...]


class DecodedText(NamedTuple):
    """The text of ids, its seams in order, and which markers are spelled in it by other tokens."""

    text: str
    seams: tuple[Seam, ...]
    spelled: frozenset[str]


class Markers:
    """The markers of one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._tokens = tokenizer.added_tokens
        self._begins_seam = frozenset(
            token_id for token_id, token in self._tokens.items() if _is_seam(token)
        )
        texts = sorted(
            (token.content for token in self._tokens.values() if _is_marker(token)),
            key=len,
            reverse=True,
        )
        self._pattern = _pattern_of(texts)
        self._seam_pattern = _pattern_of(
            [self._tokens[token_id].content for token_id in self._begins_seam]
        )
        self.examples = tuple(texts[:3])

    def escape(self, text: str) -> str:
        """Return the text with all its markers escaped.

        A tokenizer that begins every text with a space of its own cannot encode parts of one: there
        a marker gets a space behind its first character, which the policy sees."""
        text = text.replace(ESCAPE, REPLACEMENT)
        pieces = []
        place = 0
        for found in self._found(text):
            cut = found.start() + 1
            pieces.append(text[place:cut])
            place = cut
        pieces.append(text[place:])
        return self._escape.join(pieces)

    def escape_these(self, text: str, spelled: frozenset[str]) -> str:
        """Return the text with the markers of `spelled` escaped, and no others."""
        for marker in spelled:
            text = text.replace(marker, self.escape(marker))
        return text

    def begins_with_marker(self, text: str, place: int) -> bool:
        """Whether a seam is at character `place` of the text."""
        return self._seam_pattern.match(text, place) is not None

    def beginning_of(self, text: str, place: int, seams: Sequence[Seam]) -> int:
        """Return where the marker begins that holds character `place` of the text; else `place`."""
        for seam in reversed(seams):
            if seam.character > place:
                continue
            marker = self._seam_pattern.match(text, seam.character)
            if marker is not None and marker.end() > place:
                return seam.character
            return place
        return place

    def is_seam(self, token_id: int) -> bool:
        """Whether a seam is in front of each such token."""
        return token_id in self._begins_seam

    def encode(self, text: str, *, where: str | None = None) -> EncodedText:
        """Return the ids of a text in which markers may be escaped. Raises DataError where a
        character has no token."""
        token_ids: list[int] = []
        seams = []
        begin = 0
        pieces = text.split(ESCAPE)
        encoded = self._tokenizer.encode_with_places(pieces, where=where)
        for piece, (ids, places) in zip(pieces, encoded, strict=True):
            for token_id, place in zip(ids, places, strict=True):
                if token_id in self._begins_seam:
                    seams.append(Seam(begin + place, len(token_ids)))
                token_ids.append(token_id)
            begin += len(piece) + len(ESCAPE)
        return EncodedText(tuple(token_ids), tuple(seams))

    def decode(self, token_ids: Sequence[int]) -> DecodedText:
        """Return the text of sampled ids. A marker that is spelled by other tokens is escaped, and
        then wherever it occurs: a text cannot tell one from the other."""
        runs = self._runs(token_ids)
        spelled: set[str] = set()
        for run in runs:
            if run.marker is None:
                spelled.update(found[0] for found in self._found(run.text))
        known = frozenset(spelled)
        text = ""
        seams = []
        for run in runs:
            if run.marker is None:
                text += self.escape(run.text)
            elif run.text in known:
                text += self.escape_these(run.text, known)
            else:
                if self.is_seam(run.marker):
                    seams.append(Seam(len(text), run.first))
                text += run.text
        return DecodedText(text, tuple(seams), known)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids with nothing escaped."""
        return "".join(run.text for run in self._runs(token_ids))

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """Markers in a text, also where they overlap."""
        found = self._pattern.search(text)
        while found is not None:
            yield found
            found = self._pattern.search(text, found.start() + 1)

    def _runs(self, token_ids: Sequence[int]) -> list["_Run"]:
        """Added tokens one by one, and what is between them."""
        runs = []
        plain: list[int] = []
        for place, token_id in enumerate(token_ids):
            token = self._tokens.get(token_id)
            if token is None:
                plain.append(token_id)
                continue
            if plain:
                text = self._tokenizer.decode_exactly(plain)
                runs.append(_Run(text, None, place - len(plain)))
                plain = []
            runs.append(_Run(token.content, token_id, place))
        if plain:
            text = self._tokenizer.decode_exactly(plain)
            runs.append(_Run(text, None, len(token_ids) - len(plain)))
        return runs

    @cached_property
    def _escape(self) -> str:
        for marker in self.examples[:1]:
            parts = []
            try:
                parts += self._tokenizer.encode(marker[:1])
                parts += self._tokenizer.encode(marker[1:])
            except DataError:  # told where such a text is encoded
                return ESCAPE
            if self._tokenizer.decode_exactly(parts) != marker:
                return " "
        return ESCAPE


class _Run(NamedTuple):
    text: str
    marker: int | None  # the id of an added token; None: other tokens
    first: int  # place of its first token


def _is_marker(token: AddedToken) -> bool:
    """Special tokens, and added ones that are written like them: <think> is no special token of
    many tokenizers. Others are words, or white space."""
    text = token.content
    if len(text) < 2:
        return False
    return token.special or (text[0] in _OPENING and text[-1] in _CLOSING)


def _is_seam(token: AddedToken) -> bool:
    """Whether a marker is a seam: one that takes white space in front of it, or is found between
    words only, is none."""
    return not token.lstrip and not token.single_word


def _pattern_of(texts: Sequence[str]) -> re.Pattern[str]:
    if not texts:
        return re.compile(r"(?!)")  # matches nothing
    return re.compile("|".join(re.escape(text) for text in texts))
