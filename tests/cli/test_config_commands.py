"""`config show`, `diff` and `schema`, piped and on a terminal."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import read_resolved, to_json
from grpo_megatron.plan.resolve import resolve

RECIPE = "demo/gspo-moe-cpu"


def test_show_prints_value_and_origin(capsys):
    assert main(["config", "show", RECIPE, "seed=3"]) == 0
    rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["seed"] == "3\tflag seed=3"
    assert rows["trainer.num_ranks"].startswith("2\trecipes/demo/gspo-moe-cpu.toml:")
    assert rows["optimizer.eps"] == "1e-08\tdefault"


def test_show_on_a_terminal_is_a_table(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["config", "show", RECIPE]) == 0
    output = capsys.readouterr().out
    assert "set at" in output and "\x1b[" in output and "trainer.num_ranks" in output


def test_show_json_can_be_read_back(capsys, tmp_path):
    assert main(["config", "show", RECIPE, "seed=3", "--json"]) == 0
    (tmp_path / "config.json").write_text(capsys.readouterr().out)
    assert read_resolved(tmp_path) == resolve(RECIPE, ["seed=3"])


def test_a_run_from_before_a_setting_existed_has_its_default(capsys, tmp_path):
    stored = json.loads(to_json(resolve(RECIPE)))
    del stored["config"]["alarms"]
    for key in [key for key in stored["provenance"] if key.startswith("alarms.")]:
        del stored["provenance"][key]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert main(["config", "show", str(tmp_path)]) == 0
    assert "alarms.window\t10\tdefault" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["runs/none/config.json", "demo/gspo-moe-gpu"])
def test_missing_sources(source, capsys):
    assert main(["config", "show", source]) == 2
    assert "remedy" in capsys.readouterr().err


def test_schema(capsys):
    assert main(["config", "schema"]) == 0
    assert "trainer" in json.loads(capsys.readouterr().out)["properties"]
