"""Search over documents of this machine: ranks, refusals, and an index that is built once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata

import pytest

from grpo_megatron.environments import search
from grpo_megatron.environments.protocol import Reply, ToolCall
from grpo_megatron.environments.registry import bind
from grpo_megatron.environments.search import build_index, index_path, ready_index
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem
from tests.environments.test_host import domain, hosted
from tests.environments.test_tools import play

PROBLEM = Problem("Which river flows through Riga?", "Daugava")
DOCUMENTS = [
    {"id": "riga", "title": "Riga", "text": "Riga lies at the river Daugava. " + "So it is. " * 40},
    {"id": "oslo", "title": "Oslo", "text": "Oslo lies at a fjord; rivers run into it."},
    {"id": 7, "title": "Rivers", "text": "A river, many rivers, and another river."},
    {"id": "no title", "text": "Nothing of the kind."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return path


def call(name, **arguments):
    return Reply("", (ToolCall(name, arguments),))


def results(corpus, *replies):
    environment = bind("search", {"corpus": str(corpus)}).make()
    steps = play(environment, *replies, problem=PROBLEM)[1:]
    return [step.messages[0]["content"] for step in steps]


def test_documents_are_ranked_and_read(corpus):
    found, one, text = results(
        corpus,
        call("search", query="rivers"),
        call("search", query="Riga river?", top_k=1),
        call("read", document_id="riga"),
    )
    assert [line.split("]")[0] for line in found.splitlines()] == ["[7", "[oslo", "[riga"]
    assert one.startswith("[riga] Riga: Riga lies at the river Daugava.")
    assert one.endswith("…") and len(one.splitlines()) == 1
    assert text.startswith("Riga\n\nRiga lies")


def test_a_word_is_found_in_whichever_way_its_accents_are_written(corpus):
    composed = "D\u00fcnaburg"
    apart = unicodedata.normalize("NFD", composed)
    assert apart != composed
    rows = [{"id": "one", "text": composed}, {"id": "two", "text": apart}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for query in (composed, apart):
        [found] = results(corpus, call("search", query=query))
        assert len(found.splitlines()) == 2, query


def test_a_document_is_a_line_whatever_its_title(corpus):
    row = {"id": "one", "title": "Riga\nand\r\n more", "text": "a river"}
    corpus.write_text(json.dumps(row) + "\n")
    assert results(corpus, call("search", query="river")) == ["[one] Riga and more: a river"]


def test_numbers_of_documents_are_texts(corpus):
    assert results(corpus, call("read", document_id="7"))[0].startswith("Rivers\n\n")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call("search", query="zebra"), "no document has any of these words"),
        (call("search", query="?!"), "error: the query has no word"),
        (call("search", query="river", top_k=0), "error: top_k is from 1 to 20"),
        (call("search", query="river", top_k=21), "error: top_k is from 1 to 20"),
        (call("read", document_id="rome"), "error: there is no document 'rome'"),
    ],
)
def test_what_cannot_be_found_is_told(corpus, reply, words):
    assert results(corpus, reply) == [words]


@pytest.mark.parametrize(
    "query",
    ['"river', "river AND", "NEAR(river)", "title:river", "-river*", "a" * 9999, "x " * 500],
)
def test_no_query_is_an_instruction_to_the_index(corpus, query):
    [told] = results(corpus, call("search", query=query))
    assert told.startswith("[") or told.startswith("no document")


def test_the_answer_is_scored(corpus):
    environment = bind("search", {"corpus": str(corpus)}).make()
    last = play(environment, Reply("Daugava"), problem=PROBLEM)[-1]
    assert last.outcome.reward == 1


def test_an_index_is_built_again_for_another_corpus(corpus):
    index = index_path(str(corpus), None)
    ready_index(corpus, index)
    before = os.stat(index).st_ino
    ready_index(corpus, index)
    assert os.stat(index).st_ino == before
    corpus.write_text(json.dumps({"id": "a", "text": "zebra"}) + "\n\n")
    ready_index(corpus, index)
    assert os.stat(index).st_ino != before
    assert not [name for name in os.listdir(corpus.parent) if name.endswith(".tmp")]


def test_an_index_of_another_format_is_built_again(corpus, monkeypatch):
    index = index_path(str(corpus), None)
    monkeypatch.setattr(search, "_FORMAT", "1")
    ready_index(corpus, index)
    before = os.stat(index).st_ino
    monkeypatch.undo()
    ready_index(corpus, index)
    assert os.stat(index).st_ino != before


def test_a_file_that_is_no_index_is_replaced(corpus):
    index = index_path(str(corpus), None)
    index.write_text("something else")
    ready_index(corpus, index)
    assert results(corpus, call("search", query="fjord"))[0].startswith("[oslo]")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("not json\n", "line 1 of .* is no document"),
        ('{"id": "a", "text": "b"}\n{"id": "b"}\n', "line 2 of .* is no document"),
        ("[1]\n", "line 1 of .* is no document"),
        ('\n{"id": "a", "text": null}\n', "line 2 of .* is no document: it has no text"),
        ('{"id": null, "text": "b"}\n', "line 1 of .* is no document: it has no id"),
        ('{"id": "a", "text": ["b"]}\n', "line 1 of .* is no document: its text is no text"),
        ('{"id": "a", "text": "\\ud800"}\n', "line 1 of .* is no document: .*surrogates"),
        ("[" * 100_000, "line 1 of .* is no document: .*recursion"),
        ('{"id": "a", "text": "b"}\n{"id": "a", "text": "c"}\n', "cannot be built: UNIQUE"),
    ],
)
def test_a_corpus_that_is_none(corpus, lines, words):
    corpus.write_text(lines)
    with pytest.raises(EpisodeError, match=words):
        bind("search", {"corpus": str(corpus)})
    assert os.listdir(corpus.parent) == ["corpus.jsonl"]


def test_a_corpus_in_another_encoding_is_named_with_its_line(corpus):
    first = '{"id": "a", "text": "b"}\n'
    corpus.write_bytes(first.encode() + '{"id": "b", "text": "café"}\n'.encode("latin-1"))
    with pytest.raises(EpisodeError, match=r"line 2 of .* is no document: 'utf-8' codec") as caught:
        bind("search", {"corpus": str(corpus)})
    assert "in UTF-8" in caught.value.remedy


def test_a_title_may_be_null_and_a_corpus_may_begin_with_a_mark(corpus):
    row = '{"id": "a", "title": null, "text": "about rivers"}\n'
    corpus.write_text(row, encoding="utf-8-sig")
    told = results(corpus, call("search", query="None"), call("read", document_id="a"))
    assert told == ["no document has any of these words", "\n\nabout rivers"]


@pytest.mark.parametrize("name", ["a#b", "a?b", "a?mode=rw", "a%41b", "a b", "é"])
def test_a_path_may_have_signs_of_addresses(tmp_path, corpus, name):
    folder = tmp_path / name
    folder.mkdir()
    moved = corpus.rename(folder / "corpus.jsonl")
    assert results(moved, call("read", document_id="7"))[0].startswith("Rivers\n\n")
    index = index_path(str(moved), None)
    before = os.stat(index).st_ino
    ready_index(moved, index)
    assert os.stat(index).st_ino == before


def command(*arguments):
    whole = [sys.executable, "-m", "grpo_megatron.environments.search", *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "there is no corpus"),
        (b'{"id": "a", "text": "caf\xe9"}\n', "line 1 of"),
        (b'{"id": "a", "text": "b"}\n' * 2, "are ids unique"),
    ],
)
def test_the_command_says_what_is_wrong(corpus, lines, words):
    corpus.unlink()
    if lines is not None:
        corpus.write_bytes(lines)
    done = command(corpus)
    assert done.returncode == EpisodeError.exit_code
    assert words in done.stderr and "Traceback" not in done.stderr


def test_the_command_without_a_corpus_says_how_it_is_called():
    done = command()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_a_corpus_that_is_not_there():
    with pytest.raises(EpisodeError, match=r"there is no corpus .*nowhere"):
        bind("search", {"corpus": "nowhere"})


def test_a_large_corpus_is_indexed_by_a_command(corpus, monkeypatch):
    monkeypatch.setattr(search, "LARGEST_BUILT", 10)
    with pytest.raises(EpisodeError, match="has no index") as caught:
        bind("search", {"corpus": str(corpus)})
    command = caught.value.remedy.split()
    assert command[0] == "python"
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True)
    assert done.stdout.startswith("4 documents in"), done.stderr
    assert bind("search", {"corpus": str(corpus)})


def test_an_index_may_lie_elsewhere(corpus, tmp_path):
    index = tmp_path / "elsewhere"
    assert build_index(corpus, index) == 4
    assert bind("search", {"corpus": str(corpus), "index": str(index)}).make()
    assert not index_path(str(corpus), None).exists()


def test_it_searches_in_a_process_of_environments(corpus):
    async def work(host):
        environment = host.environment("d")
        await environment.reset(PROBLEM, 0)
        return (await environment.step(call("search", query="fjord"))).messages[0]["content"]

    told = hosted(work, domain("d", "search", arguments={"corpus": str(corpus)}))
    assert told.startswith("[oslo] Oslo:")
