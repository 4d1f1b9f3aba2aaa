"""The command that writes rows of an environment of `verifiers`, also without that package."""

from __future__ import annotations

import sys

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


def test_it_says_that_a_file_cannot_be_written(monkeypatch, capsys, tmp_path):
    class Environment:
        def get_dataset(self):
            return []

    monkeypatch.setattr(verifiers_adapter, "load", lambda *_: Environment())
    assert run(monkeypatch, "env", tmp_path / "no" / "rows.jsonl") == EpisodeError.exit_code
    assert "rows cannot be written: No such file" in capsys.readouterr().err
