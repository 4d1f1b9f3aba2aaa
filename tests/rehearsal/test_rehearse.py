"""What a rehearsal refuses before anything starts, and the graph that it writes."""

from __future__ import annotations

import shutil

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.errors import ConfigError
from grpo_megatron.rehearsal import rehearse_graph as graphs
from grpo_megatron.rehearsal.evidence import Finding
from grpo_megatron.rehearsal.rehearse import (
    Rehearsal,
    as_line,
    rehearse_recipe,
    resolve_at_scale,
    take_folder,
)
from grpo_megatron.rehearsal.teacher_servers import TeacherServers
from grpo_megatron.rehearsal.tiny_family import write_tiny_checkpoint
from grpo_megatron.stages.loading import load_graph

GRAPHS = assets.names(assets.root() / "recipes" / "graphs")


def test_a_model_that_is_elsewhere_is_known_by_its_preset():
    resolved = resolve_at_scale("dense/qwen3-8b", ["model.path=/cluster/qwen3-8b"], None)
    assert resolved.config.model.path is None
    assert resolved.config.model.preset == "qwen3-8b"


def test_a_model_of_which_nothing_is_known_is_refused():
    overrides = ["model.path=/cluster/mine", "model.preset=null"]
    with pytest.raises(ConfigError, match="not on this machine") as refused:
        resolve_at_scale("dense/qwen3-8b", overrides, None)
    assert "--model" in refused.value.remedy


def test_a_recipe_that_breaks_a_rule_is_refused_at_its_own_size(tmp_path, capsys):
    code = main(
        [
            "rehearse",
            "moe/qwen3-30b-a3b",
            "trainer.expert_parallel_size=7",
            "--to",
            str(tmp_path / "x"),
        ]
    )
    assert code == 2
    assert "expert_parallel_size" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_with_other_things_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no rehearsal's folder"):
        rehearse_recipe("demo/gspo-moe-cpu", [], folder=tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_an_earlier_rehearsal_is_replaced(tmp_path):
    folder = tmp_path / "r"
    take_folder(folder)
    (folder / "run").mkdir()
    take_folder(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".rehearsal", "inputs"]


def test_a_folder_that_happens_to_have_inputs_is_not_emptied(tmp_path):
    (tmp_path / "inputs").mkdir()
    with pytest.raises(ConfigError, match="no rehearsal's folder"):
        take_folder(tmp_path)
    assert (tmp_path / "inputs").exists()


def test_an_empty_folder_may_be_taken(tmp_path):
    take_folder(tmp_path)
    assert (tmp_path / "inputs").is_dir()


def test_what_was_not_shown_is_an_error():
    findings = [Finding("a", True), Finding("b", False, "nothing seen")]
    rehearsal = Rehearsal("recipe", [], findings, 1.0)
    assert [finding.what for finding in rehearsal.failed] == ["b"]
    assert as_line(findings[1]) == "NOT  b (nothing seen)"


@pytest.mark.parametrize(
    ("target", "is_graph"),
    [("r1", True), ("tiny-r1", True), ("demo/gspo-moe-cpu", False), ("nothing", False)],
)
def test_graphs_and_recipes_are_told_apart(target, is_graph):
    assert graphs.is_graph(target) == is_graph


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("tiny-r2", "tiny-r1 (a graph)"),
        ("deepseek_v3_3", "deepseek_v3_2 (a graph)"),
        ("qwen3-30b-a3bb", "moe/qwen3-30b-a3b"),
        ("moe/deepseek-v4", "moe/deepseek-v3"),
        ("moe/deepseek-v4", "deepseek_v3_2 (a graph)"),
    ],
)
def test_a_mistyped_name_is_answered_with_recipes_and_graphs(typed, near, capsys):
    assert main(["rehearse", typed]) == 2
    message = capsys.readouterr().err
    assert f"no recipe or graph at '{typed}'" in message
    assert near in message


def test_a_file_is_a_graph_if_it_has_stages(tmp_path):
    source = assets.root() / "recipes" / "graphs" / "tiny-r1.toml"
    copy = shutil.copy(source, tmp_path / "mine.toml")
    assert graphs.is_graph(str(copy))
    assert not graphs.is_graph(str(assets.root() / "recipes" / "demo" / "gspo-moe-cpu.toml"))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_scaled_graph_has_the_same_stages_and_no_gate(name, tmp_path, monkeypatch):
    """Checked by the graph's own reader; weights are not needed for that."""
    monkeypatch.setattr(
        "grpo_megatron.rehearsal.tiny_family.init_weights", lambda directory, seed: None
    )
    graph = load_graph(name)
    with TeacherServers(tmp_path) as teachers:
        changes = graphs._changes(graph, tmp_path / "inputs", None, "http://127.0.0.1:1", teachers)
    assert not teachers
    scaled = load_graph(graphs._write_graph(tmp_path, graph, changes))
    assert scaled.order == graph.order
    assert [scaled.kind(stage) for stage in scaled.order] == [
        graph.kind(stage) for stage in graph.order
    ]
    for stage in scaled.order:
        assert scaled.gates(stage) == ()
        assert scaled.table.stages[stage].inputs == graph.table.stages[stage].inputs


def test_a_tiny_checkpoint_has_a_tokenizer_for_any_text(tmp_path, monkeypatch):
    from grpo_megatron.data.tokenizer import load_tokenizer

    monkeypatch.setattr(
        "grpo_megatron.rehearsal.tiny_family.init_weights", lambda directory, seed: None
    )
    write_tiny_checkpoint(tmp_path, {"model_type": "qwen3"}, ["<｜User｜>"], seed=0)
    tokenizer = load_tokenizer(tmp_path)
    text = "<｜User｜>Ünïcode ∑ 你好\n```python\nprint(1)\n```"
    ids = tokenizer.encode(text)
    assert len(tokenizer.encode("<｜User｜>")) == 1
    assert tokenizer.decode(ids) == text.removeprefix("<｜User｜>")
    assert len(tokenizer.stop_token_ids) > 10
    assert not set(ids) & set(tokenizer.stop_token_ids)
