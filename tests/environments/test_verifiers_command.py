"""The command that writes rows of an environment of `verifiers`, also without that package."""

from __future__ import annotations

import json
import sys
from datetime import datetime

import pytest

from grpo_megatron.environments import verifiers_adapter
from grpo_megatron.errors import EpisodeError


def run(monkeypatch, *arguments):
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["verifiers_adapter", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        verifiers_adapter.main()
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: environment, file"),
        (["env"], "required: file"),
        (["env", "rows.jsonl", "{"], "'{' is no JSON"),
        (["env", "rows.jsonl", "[1]"], "'[1]' is no object"),
    ],
)
def test_it_says_how_it_is_called(monkeypatch, capsys, arguments, words):
    assert run(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


def test_it_says_that_the_package_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    assert run(monkeypatch, "some-env", tmp_path / "rows.jsonl") == EpisodeError.exit_code
    said = capsys.readouterr().err
    assert "some-env needs the package verifiers" in said
    assert "pip install 'grpo-megatron[agents]'" in said


def with_rows(monkeypatch, *rows):
    """Have the environment's data set be these rows."""

    class Environment:
        def get_dataset(self):
            return list(rows)

    monkeypatch.setattr(verifiers_adapter, "load", lambda *_: Environment())


ASKED = [{"role": "user", "content": "q", "tool_calls": None}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ASKED, "info": {"when": datetime(2026, 1, 1)}}, "datetime is not JSON"),
        ({"prompt": "Complete this:"}, "its prompt has str in place of a message"),
        ({"prompt": None}, "NoneType"),
        ({"question": "q"}, "prompt"),
    ],
)
def test_a_row_that_is_none_leaves_the_earlier_file(monkeypatch, capsys, tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text("earlier\n")
    with_rows(monkeypatch, {"prompt": ASKED, "answer": "a"}, row)
    assert run(monkeypatch, "env", path) == EpisodeError.exit_code
    said = capsys.readouterr().err
    assert "row 2 of the data set cannot be written: " in said and words in said
    assert path.read_text() == "earlier\n" and list(tmp_path.iterdir()) == [path]


def test_an_answer_may_be_anything(monkeypatch, tmp_path):
    path = tmp_path / "rows.jsonl"
    answers = [0, "", None, "a"]
    with_rows(monkeypatch, *({"prompt": ASKED, "answer": answer} for answer in answers))
    assert verifiers_adapter.write_rows("env", path) == 4
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["answer"] for row in rows] == [0, "", "", "a"]
    assert rows[0]["messages"] == [{"role": "user", "content": "q"}]


def test_a_link_is_followed(monkeypatch, tmp_path):
    """As `/dev/stdout` is one: a file must not take its place."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "rows.jsonl")
    with_rows(monkeypatch, {"prompt": ASKED})
    assert verifiers_adapter.write_rows("env", link) == 1
    assert link.is_symlink() and len(link.read_text().splitlines()) == 1


def test_it_says_that_a_file_cannot_be_written(monkeypatch, capsys, tmp_path):
    with_rows(monkeypatch)
    assert run(monkeypatch, "env", tmp_path / "no" / "rows.jsonl") == EpisodeError.exit_code
    assert "rows cannot be written: No such file" in capsys.readouterr().err
