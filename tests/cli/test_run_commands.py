"""`train` and `resume` up to the launcher, which is replaced."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest

import grpo_megatron.launch
from grpo_megatron.cli.main import main
from grpo_megatron.config.gates import refuse_absent_runs
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import DataError
from grpo_megatron.launch import slurm
from grpo_megatron.plan.resolve import refuse_missing, resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages import runner
from grpo_megatron.stages.records import Records

RECIPE = "demo/gspo-moe-cpu"


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[tuple]:
    """Calls that reach the launcher; the current directory is empty."""
    seen: list[tuple] = []
    fake = types.ModuleType("grpo_megatron.launch.local")

    def train(resolved, *, overwrite=False, in_job=False, stage_record=""):
        seen.append(("train", resolved.config.name, resolved.config.seed, overwrite))
        return 0

    def resume(run_dir, overrides, *, in_job=False, skip_reward_check=False, stage_record=""):
        seen.append(("resume", run_dir, overrides))
        return 5

    fake.train, fake.resume = train, resume
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(grpo_megatron.launch, "local", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    return seen


def make_run(name: str) -> None:
    path = Path("runs") / name
    RunDir(path).create()
    write_resolved(path / "config.json", resolve(RECIPE))


def test_train_passes_the_resolved_recipe(calls):
    assert main(["train", RECIPE, "seed=7", "name=mine"]) == 0
    assert main(["train", RECIPE, "--overwrite"]) == 0
    assert calls == [("train", "mine", 7, False), ("train", "demo", 0, True)]


def test_train_warns_of_unusual_values(calls, capsys):
    assert main(["train", RECIPE, "optimizer.lr=1e-8"]) == 0
    assert capsys.readouterr().err.startswith("warning: optimizer.lr = 1e-08: published RL")
    assert len(calls) == 1


def test_train_warns_of_a_format_that_the_chat_template_does_not_write(calls, capsys):
    setting = "domains.0.environment.tool_format=glm45"
    assert main(["train", "demo/agent-calculator-cpu", setting]) == 0
    assert 'tool_format = "glm45": the chat template writes' in capsys.readouterr().err
    assert len(calls) == 1


UNUSUAL = "optimizer.lr=1e-8"
WARNING = "warning: optimizer.lr = 1e-08: published RL"


def test_resume_warns_of_unusual_values(calls, capsys):
    make_run("demo")
    assert main(["resume", "runs/demo", UNUSUAL]) == 5
    assert capsys.readouterr().err.startswith(WARNING)
    assert calls == [("resume", Path("runs/demo"), [UNUSUAL])]


def test_resume_of_a_job_warns_of_unusual_values(calls, capsys, monkeypatch):
    make_run("demo")
    run = RunDir(Path("runs/demo"))
    run.slurm.mkdir()
    (run.slurm / "train.sbatch").write_text("")
    monkeypatch.setattr(slurm, "submit_again", lambda run_dir: "7")
    assert main(["resume", "runs/demo", UNUSUAL, "--skip-reward-check"]) == 0
    found = capsys.readouterr()
    assert found.out == "7\n" and found.err.count(WARNING) == 1
    assert calls == []


def test_eval_warns_of_unusual_values(calls, capsys, monkeypatch):
    monkeypatch.setattr(grpo_megatron.launch.local, "train", lambda *_, **__: 5)
    write_tiny_model(Path("model"), load_preset("tiny-qwen3-moe-agent"))
    setting = "domains.0.environment.tool_format=glm45"
    assert main(["eval", "demo/agent-calculator-cpu", "model", setting]) == 5
    assert 'tool_format = "glm45": the chat template writes' in capsys.readouterr().err


OF_STAGES = """
name = "tiny"

[stages.base]
recipe = "stages/tiny-base"
settings = ["objective.sapo_tau_positive=0.5"]

[stages.one]
recipe = "stages/tiny-expert"
inputs = { "model.path" = "base" }
settings = ["optimizer.lr=1e-8"]

[stages.two]
recipe = "stages/tiny-expert"
inputs = { "model.path" = "base" }
settings = ["optimizer.lr=1e-2"]

[stages.final]
export = "one"
dtype = "bfloat16"
"""


def test_submitting_stages_warns_of_unusual_values(tmp_path, capsys, monkeypatch):
    """Of the stages that are to be run; the model of all but the first is yet to come."""
    monkeypatch.chdir(tmp_path)
    Path("graph.toml").write_text(OF_STAGES)
    submitted = []
    monkeypatch.setattr(runner, "submit_graph", lambda graph, *_, **__: submitted.append(graph))
    assert main(["stages", "submit", "graph.toml", "--site", "bare"]) == 0
    base, one = capsys.readouterr().err.splitlines()
    assert base.startswith("warning: stage base: objective.sapo_tau_positive = 0.5: it has no")
    assert one.startswith("warning: stage one: optimizer.lr = 1e-08: published RL")
    [graph] = submitted
    Records(graph).begin("base")
    graph.run_dir("base").export.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "stages/config.json", graph.run_dir("base").export)
    write_resolved(graph.run_dir("base").config, graph.resolve("base"))
    graph.run_dir("base").earlier_result.write_text("{}")  # it goes on: `one` is to wait for it
    assert main(["stages", "submit", "graph.toml", "--site", "bare"]) == 0
    assert "stage one: model.path" not in capsys.readouterr().err


def test_resume_if_exists(calls):
    assert main(["train", RECIPE, "--resume-if-exists", "seed=1"]) == 0
    make_run("demo")
    assert main(["train", RECIPE, "--resume-if-exists", "seed=1"]) == 5
    assert calls == [("train", "demo", 1, False), ("resume", Path("runs/demo"), ["seed=1"])]


def test_overwrite_and_resume_exclude_each_other(calls, capsys):
    assert main(["train", RECIPE, "--resume-if-exists", "--overwrite"]) == 2
    assert "exclude each other" in capsys.readouterr().err and calls == []


def test_resume(calls):
    make_run("demo")
    assert main(["resume", "runs/demo", "num_steps=9"]) == 5
    assert calls == [("resume", Path("runs/demo"), ["num_steps=9"])]


def test_resume_of_nothing_names_what_there_is(calls, capsys):
    make_run("demo")
    for wrong in ("runs/demmo", "demo", "other"):
        assert main(["resume", wrong]) == 2
        assert str(Path("runs/demo")) in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize("command", [["train"], ["submit", "--site", "bare"]])
@pytest.mark.parametrize(
    ("recipe", "key", "path"),
    [
        (
            "stages/tiny-distil",
            "distillation.teachers.0.path",
            "runs/tiny-deepseek_v4/expert-plus/export",
        ),
        ("stages/tiny-gsm8k", "domains.0.path", "data/gsm8k/train.jsonl"),
    ],
)
def test_missing_inputs_start_nothing_and_remove_nothing(
    tmp_path, monkeypatch, capsys, command, recipe, key, path
):
    monkeypatch.chdir(tmp_path)
    kept = Path("runs") / recipe.rpartition("/")[2] / "config.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    flags = ["--overwrite"] if command == ["train"] else []
    assert main([*command, recipe, *flags]) == 4
    error = capsys.readouterr().err
    assert key in error and str(tmp_path / path) in error
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / kept]


def test_what_a_critic_begins_with_is_missed_before_the_first_checkpoint_only(tmp_path):
    flags = [f"critic.path={tmp_path / 'scorer'}", f"runs_dir={tmp_path}"]
    config = resolve("demo/ppo-moe-cpu", flags).config
    with pytest.raises(DataError, match="no such file") as missed:
        refuse_missing(config)
    assert missed.value.where == str(tmp_path / "scorer")
    refuse_missing(config, has_checkpoint=True)


def test_a_graph_that_is_not_there_is_no_recipe(capsys):
    assert main(["stages", "run", "tiny-deepseek"]) == 2
    said = capsys.readouterr().err
    assert "no graph at 'tiny-deepseek'" in said and "tiny-deepseek_v4" in said


def test_a_directory_that_cannot_be_written_is_one_message(capsys):
    assert main(["train", RECIPE, "runs_dir=/proc/runs"]) == 3
    said = capsys.readouterr().err
    assert "/proc/runs" in said and said.count("error:") == said.count("remedy:") == 1


@pytest.mark.parametrize("command", [["train"], ["submit", "--site", "bare"]])
def test_a_gate_against_a_run_that_is_not_there_starts_nothing(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    gates = 'gates=["no domain drops more than 0.02 against runs/nowhere"]'
    assert main([*command, RECIPE, gates]) == 2
    said = capsys.readouterr().err
    assert "compares with a run that is not there" in said
    assert str(tmp_path / "runs" / "nowhere") in said
    assert not list(tmp_path.iterdir())
    make_run("nowhere")  # it may end before this one does
    refuse_absent_runs(resolve(RECIPE, [gates]).config.gates)


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_checkpoint_is_no_run(calls, tmp_path, capsys, is_of_run):
    owner = RunDir(tmp_path / "a")
    directory = tmp_path / "model"
    words = "`grpo-megatron eval RECIPE MODEL` measures a model"
    if is_of_run:
        owner.create()
        write_resolved(owner.config, resolve(RECIPE, []))
        directory = owner.step_checkpoint(4)
        words = f"name its run, {owner.root}"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert main(["resume", str(directory)]) == 2
    told = capsys.readouterr().err
    assert f"{directory} is a checkpoint, not a run" in told and words in told
    assert not calls


def test_a_graph_that_never_ran_has_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "tiny-agents"]) == 2
    assert "no stage of the graph has begun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["report", "tiny-agents", "--to", "plan.html"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
