"""All rows of files are tried before anything starts."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.data import row_files
from grpo_megatron.errors import DataError
from grpo_megatron.launch import row_progress
from grpo_megatron.launch.bindings import refuse_unreadable_problems
from grpo_megatron.launch.row_checks import KnownModel, refuse_bad_rows
from grpo_megatron.plan.resolve import resolve
from tests.data.preference_files import recipe, write
from tests.launch.test_bindings import write_model

RECIPE = "demo/gspo-moe-cpu"
FROM_FILE = (
    "runs_dir=here",
    "cold_start=null",
    "data.num_heldout=1",
    "data.num_validation=1",
    "domains.0.source=file",
    "domains.0.path=rows.jsonl",
    "domains.0.dataset=null",
    "domains.0.num_problems=null",
    "domains.0.arguments={}",
    "domains.0.template={question}",
)
SFT = ("kind=sft", "domains.0.answer_field=answer")
CHAT = ("domains.0.template=chat", "model.preset=null", "model.path=model")
PAIRS = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "0"} for n in range(20)]
NUM_GOOD = 100
GOOD = json.dumps({"question": "1 + 1?", "answer": "2", "level": "easy"})


def write_rows(path, *bad: str) -> None:
    """Write 100 good rows with other questions, then bad ones."""
    lines = []
    for number in range(NUM_GOOD):
        row = {"question": f"{number} + 1?", "answer": str(number + 1), "level": "easy"}
        lines.append(json.dumps(row))
    path.write_text("\n".join([*lines, *bad]) + "\n", encoding="utf-8")


def config_of(*settings: str):
    return resolve(RECIPE, [*FROM_FILE, *settings]).config


@pytest.mark.parametrize("command", [["train"], ["submit", "--site", "bare"]])
@pytest.mark.parametrize(
    ("bad", "settings", "words"),
    [
        ('{"question": "1 + 1?", ', (), "not a JSON object"),
        ('{"question": "1 + 1?"}', (), "no field 'answer'"),
        ('{"question": "1 + 1?", "answer": [2]}', (), "is list, expected text"),
        ('{"question": " ", "answer": "2"}', (), "is empty"),
        (
            '{"question": "1 + 1?", "answer": "2"}',
            ("domains.0.template={metadata[level]} {question}",),
            "no metadata 'level'",
        ),
        (
            '{"question": "1 + 1?", "answer": "2"}',
            (*SFT, "domains.0.response_template={metadata[level]} {answer}"),
            "no metadata 'level'",
        ),
        ('{"question": "1 + \u4e00?", "answer": "2"}', (), "no token for '\u4e00'"),
        ('{"question": "1 + 1?", "answer": "\u4e00"}', SFT, "no token for '\u4e00'"),
        ('{"question": "<image> 1?", "answer": "2", "images": ["a"]}', (), "the model sees none"),
    ],
)
def test_nothing_starts_with_a_bad_row_far_down(
    tmp_path, monkeypatch, capsys, command, bad, settings, words
):
    monkeypatch.chdir(tmp_path)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    write_rows(tmp_path / "rows.jsonl", bad)
    assert main([command[0], RECIPE, *command[1:], *FROM_FILE, *settings]) == 4
    said = capsys.readouterr().err
    assert words in said
    assert f"rows.jsonl:{NUM_GOOD + 1}" in said
    assert not (tmp_path / "here").exists()


def test_a_conversation_far_down_that_the_chat_template_refuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = (
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "{{ raise_exception('no tools') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    write_model(tmp_path / "model", template)
    messages = [{"role": "user", "content": "1"}, {"role": "tool", "content": "2"}]
    write_rows(tmp_path / "rows.jsonl", json.dumps({"messages": messages, "answer": "2"}))
    with pytest.raises(DataError, match="no tools") as caught:
        refuse_unreadable_problems(config_of(*CHAT))
    assert f"rows.jsonl:{NUM_GOOD + 1}" in str(caught.value.where)


def test_a_demonstrated_turn_that_a_row_far_down_has_no_metadata_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", '{"question": "1 + 1?", "answer": "2"}')
    settings = [
        "domains.0.source=file",
        "domains.0.path=rows.jsonl",
        "domains.0.dataset=null",
        "domains.0.arguments={}",
        "domains.0.question_template={question}",
        'domains.0.environment.demonstration=["{metadata[level]}", "{answer}"]',
    ]
    config = resolve("demo/agent-calculator-cpu", settings).config
    with pytest.raises(DataError, match="no metadata 'level'") as caught:
        refuse_unreadable_problems(config)
    assert f"rows.jsonl:{NUM_GOOD + 1}" in str(caught.value.where)


def test_a_preference_far_down_that_cannot_be_written(tmp_path):
    bad = {"prompt": "1 + 1?", "chosen": "2", "rejected": "\u4e00"}
    path = write(tmp_path, [*PAIRS, bad])
    with pytest.raises(DataError, match="no token for '\u4e00'") as caught:
        refuse_unreadable_problems(recipe(path))
    assert caught.value.where == f"{path}:21"


@pytest.mark.parametrize("sees_images", [True, False])
def test_images_of_parquet_are_read_by_the_controller_alone(tmp_path, monkeypatch, sees_images):
    """Where the model reads text only, rows with images must have no marks for them."""
    path = tmp_path / "rows.parquet"
    row = {"question": "<image> what?", "answer": "2", "images": [b"no image"]}
    pq.write_table(pa.Table.from_pylist([row]), path)
    columns = []
    rows_of = row_files._rows_of

    def seen(batch, path, num_before):
        columns.append(batch.schema.names)
        return rows_of(batch, path, num_before)

    monkeypatch.setattr(row_files, "_rows_of", seen)
    config = config_of(f"domains.0.path={path}")
    model = KnownModel(None, None, sees_images=sees_images)
    if sees_images:
        refuse_bad_rows(config, 0, model)
        assert columns == [["question", "answer"]]
    else:
        with pytest.raises(DataError, match="the model sees none"):
            refuse_bad_rows(config, 0, model)
        assert columns == [["question", "answer", "images"]]


@pytest.mark.parametrize("settings", [(), SFT])
def test_a_long_check_of_rows_says_how_far_it_is(tmp_path, monkeypatch, capsys, settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(row_progress, "_SILENT_S", 0.0)
    write_rows(tmp_path / "rows.jsonl")
    refuse_unreadable_problems(config_of(*settings))
    assert "checking the data of domain 'addition': 1 rows of about 100" in capsys.readouterr().err


def test_a_long_check_of_preferences_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(row_progress, "_SILENT_S", 0.0)
    refuse_unreadable_problems(recipe(write(tmp_path, PAIRS)))
    assert "1 rows of about 20 in" in capsys.readouterr().err


def test_a_preference_that_is_left_out_may_have_any_character(tmp_path):
    equal = {"prompt": "1 + 1?", "chosen": "\u4e00", "rejected": "\u4e00"}
    refuse_unreadable_problems(recipe(write(tmp_path, [*PAIRS, equal])))
