"""Questions for whose answer the policy searches documents on this machine.

A corpus is a file of JSON lines, `{"id": …, "title": …, "text": …}`. Its index is an SQLite
database with FTS5, built once: by the first process for a small corpus, by
`python -m grpo_megatron.environments.search CORPUS [INDEX]` for any."""

import argparse
import json
import os
import re
import sqlite3
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import (
    EXACT_MATCH,
    FinalAnswer,
    ToolEnvironment,
    ToolError,
    tool,
)
from grpo_megatron.errors import EpisodeError, GrpoMegatronError, raised_as

LARGEST_BUILT = 64 << 20
"""Bytes of a corpus whose index is built without being asked for."""
MOST_RESULTS = 20
_FORMAT = "3"  # another one where documents are read in another way
_WORD = re.compile(r"\w+")
_MOST_WORDS = 64
_SNIPPET_WORDS = 32
_SCHEMA = """
CREATE TABLE documents(number INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(
    title, text, content='documents', content_rowid='number', tokenize='porter unicode61');
CREATE TABLE about(name TEXT PRIMARY KEY, value TEXT);
"""
_FIND = """
SELECT documents.id, documents.title, snippet(words, 1, '', '', '…', ?)
FROM words JOIN documents ON documents.number = words.rowid
WHERE words MATCH ? ORDER BY bm25(words), words.rowid LIMIT ?
"""


def _check(*, corpus: str, index: str | None = None, **arguments: Any) -> None:
    FinalAnswer.check(**{"reward": EXACT_MATCH, **arguments})
    ready_index(assets.input_path(Path(corpus)), index_path(corpus, index))


@traits(check=_check)
class Search(ToolEnvironment):
    """Two tools, `search` and `read`, on a `corpus`; its `index` lies beside it unless it is named.
    The outcome is `reward` of the answer that ends the episode."""

    def __init__(
        self,
        *,
        corpus: str,
        index: str | None = None,
        reward: str = EXACT_MATCH,
        reward_arguments: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._final = FinalAnswer(reward, reward_arguments)
        self._index = _opened(index_path(corpus, index))

    @tool(
        "Search the documents for words. Returns ids, titles and extracts, the best first.",
        query="words to search for",
        top_k=f"number of results, at most {MOST_RESULTS}",
    )
    async def search(self, query: str, top_k: int = 5) -> str:
        """A line for each document: any of the words counts, by BM25."""
        words = list(dict.fromkeys(_WORD.findall(_composed(query))))[:_MOST_WORDS]
        if not words:
            raise ToolError("the query has no word")
        if not 1 <= top_k <= MOST_RESULTS:
            raise ToolError(f"top_k is from 1 to {MOST_RESULTS}")
        wanted = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(_FIND, (_SNIPPET_WORDS, wanted, top_k)).fetchall()
        if not rows:
            return "no document has any of these words"
        lines = []
        for identity, title, extract in rows:
            lines.append(f"[{identity}] {_in_a_line(title)}: {_in_a_line(extract)}")
        return "\n".join(lines)

    @tool("Read a document.", document_id="an id that a search gave")
    async def read(self, document_id: str) -> str:
        """Title and text."""
        found = self._index.execute(
            "SELECT title, text FROM documents WHERE id = ?", (document_id,)
        ).fetchone()
        if found is None:
            raise ToolError(f"there is no document {document_id!r}")
        return f"{found[0]}\n\n{found[1]}"

    async def score(self, text: str) -> float:
        """Return the reward of the answer."""
        return await self._final.score(text, self.problem)


def index_path(corpus: str, index: str | None) -> Path:
    """Return where the index of a corpus lies."""
    if index is not None:
        return Path(index)
    return Path(f"{assets.input_path(Path(corpus))}.fts5")


def ready_index(corpus: Path, index: Path) -> None:
    """Build the index of a small corpus where there is none, or one of another state of the corpus.

    Raises EpisodeError where the corpus cannot be read, or is too large to index in passing."""
    _refuse_no_corpus(corpus)
    if _is_current(index, corpus):
        return
    if corpus.stat().st_size > LARGEST_BUILT:
        raise EpisodeError(
            f"{corpus} has no index {index} of its present state",
            remedy=f"python -m grpo_megatron.environments.search {corpus} {index}",
        )
    build_index(corpus, index)


def _refuse_no_corpus(corpus: Path) -> None:
    if not corpus.is_file():
        raise EpisodeError(f"there is no corpus {corpus}", remedy="name a file of JSON lines")


def build_index(corpus: Path, index: Path) -> int:
    """Read a corpus into an index, which gets its name when it is whole. Returns the number of
    documents. EpisodeError names the first line that is no document, or says that there is no
    corpus, or what cannot be written."""
    _refuse_no_corpus(corpus)
    with raised_as(EpisodeError, "the index cannot be written", OSError, where=index):
        index.parent.mkdir(parents=True, exist_ok=True)
    temporary = index.with_name(f"{index.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    before = _state_of(corpus)
    try:
        with closing(sqlite3.connect(temporary)) as database:
            database.executescript(_SCHEMA)
            database.executemany(
                "INSERT INTO documents(id, title, text) VALUES (?, ?, ?)", _documents(corpus)
            )
            database.execute("INSERT INTO words(words) VALUES ('rebuild')")
            database.execute("INSERT INTO about VALUES ('corpus', ?)", (before,))
            (count,) = database.execute("SELECT count(*) FROM documents").fetchone()
            database.commit()
        temporary.replace(index)
    except (sqlite3.Error, OSError) as error:
        raise EpisodeError(
            f"the index {index} of {corpus} cannot be built: {error}",
            remedy="are ids unique, and is there space? set `index` to a file that can be written",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return int(count)


def _documents(corpus: Path) -> Iterator[tuple[str, str, str]]:
    with corpus.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                document = _document(line)
            except (ValueError, RecursionError) as error:
                raise EpisodeError(
                    f"line {number} of {corpus} is no document: {error}",
                    remedy='a document is {"id": "…", "title": "…", "text": "…"}, in UTF-8',
                ) from error
            yield document


def _document(line: bytes) -> tuple[str, str, str]:
    """Return id, title and text of a line. Raises ValueError with what is wrong; RecursionError for
    lists within lists."""
    row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    title = _composed(_field(row, "title", default=""))
    document = (_field(row, "id"), title, _composed(_field(row, "text")))
    for text in document:
        text.encode()  # half of a character, which JSON can write, cannot be stored
    return document


def _field(row: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a field as text; numbers are taken, and where there is a default, none and null."""
    value = row.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"it has no {name}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"its {name} is no text")
    return str(value)


def _composed(text: str) -> str:
    """Return the text with each letter and its accents as one character, where there is one: a word
    is found in whichever way it is written."""
    return unicodedata.normalize("NFC", text)


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _state_of(corpus: Path) -> str:
    status = corpus.stat()
    return f"{_FORMAT} {status.st_size} {status.st_mtime_ns}"


def _is_current(index: Path, corpus: Path) -> bool:
    if not index.is_file():
        return False
    try:
        with closing(_connected(index)) as database:
            found = database.execute("SELECT value FROM about WHERE name = 'corpus'").fetchone()
    except sqlite3.Error:
        return False
    return found is not None and found[0] == _state_of(corpus)


@lru_cache(maxsize=8)
def _opened(index: Path) -> sqlite3.Connection:
    """One connection for all episodes of a process, which only reads."""
    return _connected(index)


def _connected(index: Path) -> sqlite3.Connection:
    """Open an index to read, whatever signs of addresses its path has."""
    return sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)


def main() -> None:
    """Build an index: `CORPUS [INDEX]`."""
    parser = argparse.ArgumentParser(prog="python -m grpo_megatron.environments.search")
    parser.add_argument("corpus", help='lines of {"id": …, "title": …, "text": …}')
    parser.add_argument("index", nargs="?", help="default: beside the corpus")
    given = parser.parse_args()
    try:
        index = index_path(given.corpus, given.index)
        num_documents = build_index(assets.input_path(Path(given.corpus)), index)
    except GrpoMegatronError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{num_documents} documents in {index}")


if __name__ == "__main__":
    main()
