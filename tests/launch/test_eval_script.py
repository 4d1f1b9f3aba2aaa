"""What `slurm/eval.sbatch` asks for is a valid evaluation of every shipped recipe that has one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.plan.resolve import resolve

SCRIPT = Path("slurm/eval.sbatch")
WITHOUT_ANSWERS = ("preferences", "reward_model")
"""Kinds whose domains have no rewards, by which an evaluation scores answers."""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """Those that the script gives to train.sbatch, which is another one here, as is Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    script = folder / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    (folder / "train.sbatch").write_text('printf "%s\\n" "$@"\n')
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   Command={script} RECIPE"\n')
    scontrol.chmod(0o755)
    done = subprocess.run(
        ["bash", script, "RECIPE", "/runs/expert/export", "evaluation.num_samples=4"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_it_evaluates_the_checkpoint_as_the_user_says(arguments):
    assert arguments[:2] == ["RECIPE", "name=eval-expert-7"]
    assert {"kind=eval", "model.path=/runs/expert/export"} <= set(arguments)
    assert arguments[-1] == "evaluation.num_samples=4"


KINDS = {name: resolve(name).config.kind for name in assets.names(assets.root() / "recipes")}


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name] not in WITHOUT_ANSWERS])
def test_every_recipe_can_be_evaluated(arguments, name):
    settings = [text for text in arguments[2:] if not text.startswith("model.")]
    if KINDS[name] == "experience":
        settings.append("experience.path=/runs/lessons/experience.json")
    config = resolve(name, settings).config
    assert config.kind == "eval" and not config.trains
