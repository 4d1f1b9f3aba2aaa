"""What a resume may change of a run, before anything starts."""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import read_resolved, write_resolved
from grpo_megatron.errors import CheckpointError, ConfigError, DataError
from grpo_megatron.launch import local, slurm
from grpo_megatron.launch.resuming import resolve_resumed
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import SETTINGS_TAKEN, append_event

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


ADAPTERS = ["lora.rank=3", "lora.alpha=5"]


def add_checkpoint(run_dir: RunDir, *, folder: str = "", **record: object) -> Path:
    """A checkpoint of step 2 that says `record` of itself."""
    directory = run_dir.checkpoints / folder / "step_000002"
    directory.mkdir(parents=True)
    (directory / "complete.json").write_text(json.dumps({"step": 2, **record}))
    return directory


def adapters_of(run_dir: RunDir) -> dict[str, object]:
    lora = read_resolved(run_dir.config).config.lora
    assert lora is not None
    return lora.identity()


def test_settings_that_a_checkpoint_does_not_fit_are_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("it was started"))
    run_dir = make_run(tmp_path / "q1", *ADAPTERS)
    directory = add_checkpoint(run_dir, lora=adapters_of(run_dir))
    before = run_dir.config.read_bytes()
    assert main(["resume", str(run_dir.root), "lora.rank=4"]) == 8
    told = capsys.readouterr().err
    assert str(directory) in told and "'rank': 3" in told and "'rank': 4" in told
    assert main(["resume", str(run_dir.root), "lora=null"]) == 8
    assert run_dir.config.read_bytes() == before
    assert resolve_resumed(run_dir, ["optimizer.lr=1e-6"]).config.optimizer.lr == 1e-6


def test_a_checkpoint_without_adapters_or_critic_is_not_gone_on_with(tmp_path):
    """Of RL also where the recipe has a cold start: that is over then."""
    run_dir = make_run(tmp_path / "q1")
    assert read_resolved(run_dir.config).config.cold_start is not None
    add_checkpoint(run_dir)
    with pytest.raises(CheckpointError, match="no adapters"):
        resolve_resumed(run_dir, ADAPTERS)
    resolve_resumed(run_dir, ["num_steps=500"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [("num_steps=1", "2 steps are trained"), ("seed=3", "the seed with which it began")],
)
def test_what_is_trained_is_not_taken_back(tmp_path, monkeypatch, capsys, flag, words):
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("it was started"))
    run_dir = make_run(tmp_path / "q1")
    assert resolve_resumed(run_dir, [flag])  # nothing is trained yet
    add_checkpoint(run_dir)
    before = run_dir.config.read_bytes()
    assert main(["resume", str(run_dir.root), flag]) == 2
    assert words in capsys.readouterr().err
    assert run_dir.config.read_bytes() == before
    assert resolve_resumed(run_dir, ["num_steps=2", "seed=0"])


def test_adapters_come_after_a_cold_start(tmp_path):
    """Its checkpoints have none, whatever the recipe says."""
    run_dir = make_run(tmp_path / "q1")
    add_checkpoint(run_dir, folder="cold_start")
    assert resolve_resumed(run_dir, ADAPTERS).config.lora is not None


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run_dir = make_run(tmp_path / "q1", *ADAPTERS)
    directory = add_checkpoint(run_dir, lora=adapters_of(run_dir))
    newer = directory.with_name("step_000003")
    newer.mkdir()
    (newer / "complete.json").write_text('{"step": 3, "lo')
    with pytest.raises(CheckpointError):
        resolve_resumed(run_dir, ["lora.rank=4"])
    resolve_resumed(run_dir, [])


@pytest.mark.parametrize("record", [None, "", "null", "[]", "3"])
def test_a_run_whose_checkpoints_all_lack_their_mark_does_not_begin_again(tmp_path, record):
    """Also an older one of a cold start is not gone on with: the run was beyond it."""
    run_dir = make_run(tmp_path / "q1")
    add_checkpoint(run_dir, folder="cold_start")
    damaged = run_dir.step_checkpoint(4)
    damaged.mkdir()
    if record is not None:
        (damaged / "complete.json").write_text(record)
    with pytest.raises(CheckpointError, match="every checkpoint of this run is damaged") as refused:
        resolve_resumed(run_dir, [])
    assert refused.value.where == str(damaged)


class Ending:
    """What replaces the processes of a run: writes an event, and ends as it is told."""

    def __init__(self, event: str = "", raised: BaseException | None = None):
        self.event = event
        self.raised = raised
        self.num_steps = 0

    def __call__(self, resolved, run_dir: RunDir, in_job: bool) -> int:
        write_resolved(run_dir.config, resolved)
        self.num_steps = read_resolved(run_dir.config).config.num_steps
        if self.event:
            append_event(run_dir.events, self.event, step=2)
        if self.raised is not None:
            raise self.raised
        return 130


@pytest.mark.parametrize(
    ("event", "has_checkpoint", "is_kept"),
    [
        ("", True, False),
        ("started", True, False),
        ("resumed", True, False),  # its sampler may refuse the recipe after that
        (SETTINGS_TAKEN, True, True),
        ("cold_start_resumed", True, True),
        ("", False, True),
    ],
)
@pytest.mark.parametrize("raised", [None, DataError("of another seed", remedy="x"), KeyError()])
def test_a_resume_that_is_refused_leaves_the_configuration_as_it_was(
    tmp_path, monkeypatch, capsys, event, has_checkpoint, is_kept, raised
):
    run_dir = make_run(tmp_path / "q1")
    append_event(run_dir.events, SETTINGS_TAKEN, step=0)  # of the attempt before
    if has_checkpoint:
        add_checkpoint(run_dir)
    before = run_dir.config.read_bytes()
    ending = Ending(event, copy.copy(raised))
    monkeypatch.setattr(local, "_run", ending)
    with contextlib.suppress(DataError, KeyError):
        local.resume(run_dir.root, ["num_steps=777"])
    assert ending.num_steps == 777
    assert (run_dir.config.read_bytes() != before) == is_kept
    told = f"{getattr(ending.raised, 'remedy', '')}{capsys.readouterr().err}"
    is_told = "config.json is as it was, without num_steps=777" in told
    assert is_told == (not is_kept and not isinstance(raised, KeyError))


def test_a_resume_with_the_same_settings_says_nothing_of_them(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "q1")
    add_checkpoint(run_dir)
    monkeypatch.setattr(local, "_run", Ending(raised=DataError("damaged", remedy="x")))
    run_dir.config.write_text(run_dir.config.read_text() + " ")  # and is written anew without it
    with pytest.raises(DataError) as caught:
        local.resume(run_dir.root, [])
    assert caught.value.remedy == "x"


@pytest.mark.parametrize("name", ["endpoints", "rollouts", "progress"])
def test_an_attempt_has_no_records_of_one_before_it_behind_a_link(tmp_path, name):
    """Only the link goes."""
    run_dir = make_run(tmp_path / "q1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trainer.json").write_text("of the attempt before")
    with contextlib.suppress(FileNotFoundError):
        (run_dir.root / name).rename(tmp_path / "old")
    (run_dir.root / name).symlink_to(elsewhere)
    run_dir.begin()
    assert not (run_dir.root / name / "trainer.json").exists()
    assert (elsewhere / "trainer.json").exists()


UNBOUND = "domains.0.rewards.0.function=no_such_module:score"


def test_a_resume_tries_what_its_recipe_names_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("it was started"))
    run_dir = make_run(tmp_path / "q1")
    before = run_dir.config.read_bytes()
    assert main(["resume", str(run_dir.root), UNBOUND]) == 10
    assert "no_such_module" in capsys.readouterr().err
    assert run_dir.config.read_bytes() == before


@pytest.mark.parametrize("flag", ["--in-job", "--skip-reward-check"])
def test_what_a_recipe_names_is_left_to_the_controller(tmp_path, monkeypatch, capsys, flag):
    """Of a job, whose batch script is outside of the container that has it, and where told."""
    ending = Ending()
    monkeypatch.setattr(local, "_run", ending)
    run_dir = make_run(tmp_path / "q1", UNBOUND)
    assert main(["resume", str(run_dir.root), "num_steps=777", flag]) == 130
    assert ending.num_steps == 777
    is_warned = "warning: rewards are not checked here" in capsys.readouterr().err
    assert is_warned == (flag == "--skip-reward-check")


def test_the_data_of_a_resume_is_tried_where_its_rewards_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("it was started"))
    run_dir = make_run(tmp_path / "q1", UNBOUND)
    command = ["resume", str(run_dir.root), "domains.0.dataset=basic_arithmetik"]
    assert main([*command, "--skip-reward-check"]) == 4
    assert "basic_arithmetic" in capsys.readouterr().err


IMPORTS_OF_A_FRONT_END = """
import sys

for name in ("numpy", "xxhash", "safetensors", "tokenizers", "torch"):
    sys.modules[name] = None
import grpo_megatron.cli.run_commands
import grpo_megatron.launch.local
import grpo_megatron.launch.slurm
"""


def test_the_front_end_of_a_cluster_needs_no_library_of_the_container():
    """Which are those that `slurm/sites/pyxis.env` names."""
    subprocess.run([sys.executable, "-c", IMPORTS_OF_A_FRONT_END], check=True)


def test_one_that_goes_on_as_a_job_tries_too(tmp_path, monkeypatch, capsys):
    """What only the cluster can import is left to the job, where that is said."""
    submitted = []
    monkeypatch.setattr(slurm, "submit_again", lambda run_dir: submitted.append(run_dir) or "17")
    monkeypatch.setattr(slurm, "active_job", lambda run_dir: None)
    run_dir = make_run(tmp_path / "q1")
    run_dir.slurm.mkdir()
    (run_dir.slurm / "train.sbatch").touch()
    before = run_dir.config.read_bytes()
    command = ["resume", str(run_dir.root), UNBOUND]
    assert main(command) == 10
    assert "give --skip-reward-check" in capsys.readouterr().err
    assert run_dir.config.read_bytes() == before and submitted == []
    assert main([*command, "--skip-reward-check"]) == 0
    assert capsys.readouterr().out.strip() == "17" and len(submitted) == 1
