"""Questions for whose answer the policy searches documents on this machine.

A corpus is a file of JSON lines, `{"id": …, "title": …, "text": …}`. Its index is an SQLite
database with FTS5, built once: by the first process for a small corpus, by
`python -m grpo_megatron.environments.search CORPUS [INDEX]` for any."""

import json
import os
import re
import sqlite3
import sys
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
from grpo_megatron.errors import EpisodeError, raised_as

LARGEST_BUILT = 64 << 20
"""Bytes of a corpus whose index is built without being asked for."""
MOST_RESULTS = 20
_FORMAT = "1"
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
        words = list(dict.fromkeys(_WORD.findall(query)))[:_MOST_WORDS]
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
            shown = " ".join(extract.split())
            lines.append(f"[{identity}] {title}: {shown}")
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
    if not corpus.is_file():
        raise EpisodeError(f"there is no corpus {corpus}", remedy="set `corpus` to a file of JSONL")
    if _is_current(index, corpus):
        return
    if corpus.stat().st_size > LARGEST_BUILT:
        raise EpisodeError(
            f"{corpus} has no index {index} of its present state",
            remedy=f"python -m grpo_megatron.environments.search {corpus} {index}",
        )
    build_index(corpus, index)


def build_index(corpus: Path, index: Path) -> int:
    """Read a corpus into an index, which gets its name when it is whole. Returns the number of
    documents. EpisodeError names the first line that is no document, or what cannot be written."""
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
    with corpus.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                document = (str(row["id"]), str(row.get("title", "")), str(row["text"]))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EpisodeError(
                    f"line {number} of {corpus} is no document",
                    remedy='a document is {"id": "…", "title": "…", "text": "…"}',
                ) from error
            yield document


def _state_of(corpus: Path) -> str:
    status = corpus.stat()
    return f"{_FORMAT} {status.st_size} {status.st_mtime_ns}"


def _is_current(index: Path, corpus: Path) -> bool:
    if not index.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT value FROM about WHERE name = 'corpus'").fetchone()
    except sqlite3.Error:
        return False
    return found is not None and found[0] == _state_of(corpus)


@lru_cache(maxsize=8)
def _opened(index: Path) -> sqlite3.Connection:
    """One connection for all episodes of a process, which only reads."""
    return sqlite3.connect(f"file:{index}?mode=ro", uri=True)


def main() -> None:
    """Build an index: `CORPUS [INDEX]`."""
    corpus = sys.argv[1]
    index = index_path(corpus, next(iter(sys.argv[2:]), None))
    print(f"{build_index(Path(corpus), index)} documents in {index}")


if __name__ == "__main__":
    main()
