"""`grpo-megatron eval` with every recipe that has answers; `slurm/eval.sbatch` is it as a job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.eval_command import evaluation_settings, exported, table
from grpo_megatron.cli.main import main
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve

SCRIPT = Path("slurm/eval.sbatch")
WITHOUT_ANSWERS = ("preferences", "reward_model")
"""Kinds whose domains have no rewards, by which an evaluation scores answers."""


@pytest.mark.parametrize("model", ["/runs/expert", "/runs/expert/export"])
def test_the_script_evaluates_what_the_user_says(tmp_path, model):
    """train.sbatch is another one here, as is Slurm."""
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    (tmp_path / "train.sbatch").write_text('printf "%s\\n" "$@"\n')
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   Command={script} RECIPE"\n')
    scontrol.chmod(0o755)
    done = subprocess.run(
        ["bash", script, "RECIPE", model, "evaluation.num_samples=4"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "eval",
        "RECIPE",
        model,
        "name=eval-expert-7",
        "evaluation.num_samples=4",
        "--overwrite",
    ]


KINDS = {name: resolve(name).config.kind for name in assets.names(assets.root() / "recipes")}


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name] not in WITHOUT_ANSWERS])
def test_every_recipe_can_be_evaluated(name):
    settings = evaluation_settings(name, Path("/runs/expert/export"))
    assert {"name=eval-expert", "model.path=/runs/expert/export"} <= set(settings)
    settings = [text for text in settings if not text.startswith("model.")]
    if KINDS[name] == "experience":
        settings.append("experience.path=/runs/lessons/experience.json")
    config = resolve(name, settings).config
    assert config.kind == "eval" and not config.trains


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name] in WITHOUT_ANSWERS])
def test_a_recipe_without_rewards_is_refused(name):
    with pytest.raises(ConfigError, match=f"of kind {KINDS[name]} has no rewards"):
        evaluation_settings(name, Path("/runs/expert/export"))


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_a_checkpoint_or_what_a_run_has_exported(tmp_path):
    write(tmp_path / "hub/config.json")
    assert exported(tmp_path / "hub") == tmp_path / "hub"
    run = tmp_path / "runs/expert"
    (run / "logs").mkdir(parents=True)
    write(run / "config.json")
    with pytest.raises(ConfigError, match="exported no checkpoint yet"):
        exported(run)
    write(run / "export/config.json")
    assert exported(run) == run / "export"


@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_what_is_neither_is_told(tmp_path, capsys, is_checkpoint):
    model = tmp_path / "runs/expert/checkpoints/step_000004"
    words = ["neither a Hugging Face checkpoint nor a run"]
    if is_checkpoint:
        write(model / "complete.json")
        words = ["checkpoint of Megatron", f"convert to-hf {model}"]
    assert main(["eval", "demo/gspo-moe-cpu", str(model), f"runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words)
    assert not (tmp_path / "eval-expert").exists()


def test_a_line_for_each_domain():
    results = {
        "addition": {
            "prompts": 1024.0,
            "accuracy": 0.859375,
            "accuracy_low": 0.83674,
            "accuracy_high": 0.87933,
            "pass_at_2": 0.8514,
            "pass_at_16": 0.9023,
            "pass_at_16_low": 0.8826,
            "majority_at_16": 0.8174,
        },
        "all": {"prompts": 0.0},
    }
    assert table(results) == [
        "addition    1024 prompts  accuracy 0.859 (0.837 to 0.879)"
        "  pass@16 0.902  majority@16 0.817",
        "all            0 prompts",
    ]
