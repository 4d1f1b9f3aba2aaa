"""What `grpo-megatron convert` refuses by its arguments alone."""

from __future__ import annotations

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import load_recipe, write_resolved
from grpo_megatron.rundir import RunDir


@pytest.mark.parametrize("words", [["check"], ["to-hf", "--to", "out"]])
def test_a_run_is_no_checkpoint_but_has_some(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    run.create()
    run.events.touch()
    write_resolved(run.config, load_recipe("demo/gspo-moe-cpu"))
    command, *options = words
    assert main(["convert", command, str(run.root), *options]) == 2
    assert "is a run, and no checkpoint" in capsys.readouterr().err
    for step in (3, 12):
        run.step_checkpoint(step).mkdir()
        (run.step_checkpoint(step) / "complete.json").touch()
    assert main(["convert", command, str(run.root), *options]) == 2
    assert f"give one of its checkpoints: {run.step_checkpoint(12)}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
