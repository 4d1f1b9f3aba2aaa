"""`grpo-megatron eval` with every recipe that has answers; `slurm/eval.sbatch` is it as a job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.eval_command import evaluation_settings, exported, table
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import load_recipe, write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir

SCRIPT = Path("slurm/eval.sbatch")
WITHOUT_ANSWERS = ("preferences", "reward_model")
"""Kinds whose domains have no rewards, by which an evaluation scores answers."""


@pytest.mark.parametrize("model", ["/runs/expert", "/runs/expert/export"])
def test_the_script_evaluates_what_the_user_says(tmp_path, model):
    """train.sbatch is another one here, as is Slurm."""
    tmp_path = tmp_path / "a folder"
    tmp_path.mkdir()
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


def make_run(path: Path, *settings: str) -> None:
    """The configuration and the logs of a run of the demo's recipe."""
    (path / "logs").mkdir(parents=True)
    write_resolved(path / "config.json", load_recipe("demo/gspo-moe-cpu", settings))


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_a_checkpoint_or_what_a_run_has_exported(tmp_path):
    write(tmp_path / "hub/config.json")
    assert exported(tmp_path / "hub") == tmp_path / "hub"
    run = tmp_path / "runs/expert"
    make_run(run)
    with pytest.raises(ConfigError, match="exported no checkpoint") as caught:
        exported(run)
    assert "let the run end: it has no checkpoint either" in str(caught.value)
    for step in (2, 4):
        write(run / f"checkpoints/step_{step:06d}/complete.json")
    with pytest.raises(ConfigError) as caught:
        exported(run)
    newest = run / "checkpoints/step_000004"
    assert f"`grpo-megatron convert to-hf {newest} --to FOLDER`" in str(caught.value)
    write(run / "export/config.json")
    assert exported(run) == run / "export"
    write(run / "result.json")
    assert exported(run) == run / "export"
    RunDir(run).outdate_result()  # it trains further
    with pytest.raises(ConfigError, match="has gone on since it exported") as caught:
        exported(run)
    assert f"convert to-hf {newest}" in caught.value.remedy
    assert f"exported before: {run / 'export'}" in caught.value.remedy
    assert exported(run / "export") == run / "export"
    write(run / "result.json")  # it has ended again
    assert exported(run) == run / "export"


def test_a_run_that_trains_nothing_names_its_model(tmp_path):
    run = tmp_path / "runs/lessons"
    make_run(run, *evaluation_settings("demo/gspo-moe-cpu", Path("/models/base"))[1:])
    with pytest.raises(ConfigError) as caught:
        exported(run)
    assert "it trains nothing: evaluate its model, /models/base" in str(caught.value)


@pytest.mark.parametrize(
    "override", ["kind=rl", "num_steps=4", "model.path=other", "model.preset=qwen3-8b"]
)
def test_an_evaluation_stays_one(tmp_path, capsys, override):
    assert main(["eval", "demo/gspo-moe-cpu", str(tmp_path), override]) == 2
    told = capsys.readouterr().err
    assert f"`eval` sets {override.split('=')[0]} itself" in told and "remedy" in told


def test_only_an_evaluation_is_replaced(tmp_path, capsys):
    """Not the run that is evaluated, whose name somebody gave."""
    run = tmp_path / "expert"
    make_run(run)
    write_tiny_model(run / "export", load_preset("tiny-qwen3-moe"))
    arguments = ["name=expert", f"runs_dir={tmp_path}", "--overwrite"]
    assert main(["eval", "demo/gspo-moe-cpu", str(run), *arguments]) == 2
    assert "'expert' is a run of kind rl" in capsys.readouterr().err
    assert (run / "export/config.json").exists()


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


def test_a_line_tells_what_could_not_be_scored():
    results = {
        "sums": {
            "prompts": 8.0,
            "accuracy": 1.0,
            "accuracy_low": 0.5101,
            "accuracy_high": 1.0,
            "accuracy_unscorable": 4.0,
            "pass_at_2": 1.0,
            "pass_at_2_unscorable": 5.0,
            "majority_at_2": 0.5,
            "majority_at_2_unscorable": 0.0,
            "pass_at_4_unscorable": 8.0,
            "majority_at_4_unscorable": 8.0,
        },
        "poems": {"prompts": 2.0, "accuracy_unscorable": 2.0},
        "all": {"prompts": 10.0, "accuracy": 1.0, "accuracy_unscorable": 6.0},
    }
    assert table(results) == [
        "sums        8 prompts  accuracy 1.000 (0.510 to 1.000; 4 of 8 prompts could not be scored)"
        "  pass@4 unknown (unreliable: 8 of 8 prompts could not be scored)"
        "  majority@4 unknown (unreliable: 8 of 8 prompts could not be scored)",
        "poems       2 prompts  accuracy unknown (unreliable: 2 of 2 prompts could not be scored)",
        "all        10 prompts  accuracy 1.000 (unreliable: 6 of 10 prompts could not be scored)",
    ]


def test_of_adapters_by_domain_one_domain_is_evaluated(tmp_path):
    run = tmp_path / "experts"
    make_run(run)
    for domain in ("math", "code"):
        write(run / "export" / domain / "config.json")
    with pytest.raises(ConfigError) as caught:
        exported(run)
    assert f"evaluate one of {run}/export/code, {run}/export/math" in str(caught.value)
    of_math = run / "export" / "math"
    assert exported(of_math) == of_math
    assert "name=eval-experts-math" in evaluation_settings("demo/gspo-moe-cpu", of_math)


def test_exports_of_domains_that_are_old_or_unfinished(tmp_path):
    run = tmp_path / "experts"
    make_run(run)
    write(run / "export" / "math.partial" / "config.json")
    with pytest.raises(ConfigError, match="exported no checkpoint"):
        exported(run)
    write(run / "export" / "math" / "config.json")
    write(run / "result.json")
    RunDir(run).outdate_result()  # it trains further
    with pytest.raises(ConfigError, match="has gone on since it exported") as caught:
        exported(run)
    assert f"exported before: {run}/export/math" in caught.value.remedy


def test_a_checkpoint_with_adapters_by_domain_is_converted_for_one(tmp_path):
    write(tmp_path / "complete.json")
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path)
    assert "--domain" not in str(caught.value)
    (tmp_path / "complete.json").write_text('{"adapter_domains": ["math", "code"]}')
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path)
    assert f"convert to-hf {tmp_path} --to FOLDER --domain math`" in str(caught.value)
