"""What a resume may change of a run, before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import read_resolved, write_resolved
from grpo_megatron.errors import ConfigError
from grpo_megatron.launch import local
from grpo_megatron.launch.resuming import resolve_resumed
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir

DEMO = "demo/gspo-moe-cpu"
NAME = "moved run é"


def make_run(root: Path, *flags: str) -> RunDir:
    """A run that has begun and has no checkpoint."""
    run_dir = RunDir(root)
    run_dir.create()
    write_resolved(run_dir.config, resolve(DEMO, [f"runs_dir={root.parent}", "name=q1", *flags]))
    return run_dir


@pytest.mark.parametrize("flag", ["name=zz", "runs_dir=elsewhere"])
def test_a_run_that_is_resumed_stays_where_it_is(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("it was started"))
    run_dir = make_run(tmp_path / "q1")
    before = run_dir.config.read_bytes()
    assert main(["resume", str(run_dir.root), flag]) == 2
    told = capsys.readouterr().err
    assert "stays where it is" in told and f"those of {tmp_path / 'q1'}" in told
    assert run_dir.config.read_bytes() == before


def test_what_says_where_a_run_is_changes_nothing(tmp_path, monkeypatch):
    """As `train --resume-if-exists` gives it; of one that was moved, also where it is now."""
    here = ["name=q1", f"runs_dir={tmp_path}"]
    assert resolve_resumed(make_run(tmp_path / "q1"), here).config.name == "q1"
    monkeypatch.chdir(tmp_path)
    moved = RunDir((tmp_path / "q1").rename(tmp_path / "moved"))
    assert resolve_resumed(moved, here).config.name == "q1"
    assert resolve_resumed(moved, ["name=moved"]).config.name == "moved"
    assert resolve_resumed(moved, ["name=moved", "runs_dir=."]).run_path == Path("moved")
    with pytest.raises(ConfigError, match="stays where it is"):
        resolve_resumed(moved, ["name=other"])


def test_a_command_of_a_remedy_is_one_that_a_shell_takes(tmp_path):
    run_dir = RunDir(tmp_path / NAME)
    command = run_dir.command("logs", "-f")
    assert shlex.split(command) == ["grpo-megatron", "logs", "-f", str(run_dir.root)]
    make_run(run_dir.root)
    with pytest.raises(ConfigError) as caught:
        run_dir.refuse_existing()
    assert f"`{run_dir.command('resume')}`" in caught.value.remedy


def test_a_remedy_quotes_the_step_that_it_names(tmp_path, capsys):
    run_dir = make_run(tmp_path / NAME)
    assert main(["replay", f"{run_dir.root}@x"]) == 2
    assert f"for example '{run_dir.root}@100'" in capsys.readouterr().err


def test_a_run_is_resumed_with_its_settings(tmp_path):
    run_dir = make_run(tmp_path / "q1")
    assert resolve_resumed(run_dir, ["num_steps=7"]).config.num_steps == 7
    assert read_resolved(run_dir.config).config.num_steps != 7
