"""Batch scripts as text, sites, and what srun says; a real Slurm is in tests/slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.controller.recorder import drop_disconnected
from grpo_megatron.errors import SetupError
from grpo_megatron.launch.slurm import is_active
from grpo_megatron.launch.steps import Step

RECIPES = assets.names(assets.root() / "recipes")
SITES = sorted(p.stem for p in (assets.root() / "slurm" / "sites").glob("*.env"))
GIVEN = {"VENV": "/shared/venv", "PARTITION": "gpu", "ACCOUNT": "lab", "IMAGE": "/shared/image"}
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def check(script: Path) -> None:
    """It parses, and shellcheck, where it is installed, finds nothing."""
    subprocess.run(["bash", "-n", script], check=True)
    if SHELLCHECK:
        done = subprocess.run([SHELLCHECK, "--shell=bash", script],
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def given(monkeypatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("path", sorted(
    p.relative_to(assets.root() / "slurm").as_posix() for p in (assets.root() / "slurm").rglob("*")
    if p.suffix in (".sbatch", ".sh", ".env")))
def test_shipped_scripts_parse(path, given):
    if path.endswith(".env"):
        subprocess.run(["bash", "-n", assets.root() / "slurm" / path], check=True)
    else:
        check(assets.root() / "slurm" / path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_renders(given, tmp_path, capsys, recipe):
    for site in SITES:
        code = main(["submit", recipe, "--site", site, "--dry-run", f"runs_dir={tmp_path}"])
        script = tmp_path / "script"
        script.write_text(capsys.readouterr().out)
        assert code == 0
        check(script)
    assert sorted(tmp_path.iterdir()) == [script]  # a dry run leaves nothing


def test_a_rendered_script_is_complete(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ROLLOUT_PARTITION", "small")
    main(["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run", f"runs_dir={tmp_path}",
          "placement.trainer_nodes=2", "placement.rollout_nodes=3"])
    text = capsys.readouterr().out
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --partition=gpu\n#SBATCH --nodes=2" in first
    assert "#SBATCH --requeue" in first and "#SBATCH --signal=B:USR1@600" in first
    assert "#SBATCH --partition=small\n#SBATCH --nodes=3" in second
    assert "ROLLOUT_PARTITION=small" in second and "VENV=/shared/venv" in second
    assert f"set -- {tmp_path}/demo\n" in second


@pytest.mark.parametrize(("arguments", "words"), [
    (["--site", "bare"], ["VENV is not set: ", "slurm/sites/bare.env"]),
    (["--site", "baer"], ["did you mean 'bare'"]),
    ([], ["--site"]),
])
def test_a_wrong_site_is_one_message(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.delenv("VENV", raising=False)
    assert main(["submit", "demo/gspo-moe-cpu", *arguments, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_without_slurm_nothing_is_left_behind(given, tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "sed", "sort", "cat"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["submit", "demo/gspo-moe-cpu", "--site", "bare",
                 f"runs_dir={tmp_path}/runs"]) != 0
    assert "login node" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "demo").exists()


def test_a_silent_controller_does_not_mean_an_ended_job(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error: '\"$SAID\" >&2; exit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", "Invalid job id specified")
    assert not is_active("7")
    monkeypatch.setenv("SAID", "Unable to contact slurm controller (connect failure)")
    with pytest.raises(SetupError, match="Unable to contact"):
        is_active("7")


@pytest.mark.parametrize(("said", "name", "code"), [
    ("srun: error: node2: task 1: Killed\nsrun: error: node1: task 0: Exited with exit code 6\n",
     "trainer-1", 137),
    ("srun: error: node1: tasks 4-7: Exited with exit code 8\n", "trainer-4", 8),
    ("srun: error: Unable to create step for job 3\n", "step", 1),
])
def test_the_first_task_that_ended_is_named(tmp_path, said, name, code):
    (tmp_path / f"{name}.log").write_text("its last words\n")
    step = Step("step", ["bash", "-c", f"printf '{said}' >&2; exit 1"],
                tmp_path / "srun.log", task_log="trainer-%t.log")
    step.start()
    step.process.wait()
    end = step.end()
    assert (end.name, end.exit_code) == (name, code)
    assert ("its last words" in str(end)) == (name != "step")


def test_recorded_steps_after_a_gap_are_dropped(tmp_path):
    for step in (3, 4, 5, 7, 8):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}" / "manifest.json").touch()
    drop_disconnected(tmp_path, 4)
    assert sorted(int(p.name[5:]) for p in tmp_path.iterdir()) == [3, 4, 5]
