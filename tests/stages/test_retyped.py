"""Stages that were runs and are merges or exports of the graph now, and the other way round."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.checkpoints import merge
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import CheckpointError, ConfigError, RunLockedError
from grpo_megatron.launch import local, slurm
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages import runner
from grpo_megatron.stages.graph import Graph
from grpo_megatron.stages.interrupts import InterruptForwarder
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.records import Records
from grpo_megatron.stages.replaced import ReplacedStages
from grpo_megatron.stages.report import write_report
from grpo_megatron.stages.runner import run_graph, submit_graph
from grpo_megatron.telemetry.events import append_event
from tests.stages.test_report import data_of

GRAPH = """
name = "tiny"
runs_dir = "{runs}"

[stages.base]
recipe = "stages/tiny-base"

[stages.two]
{two}

[stages.soup]
{soup}
"""
RUN = 'recipe = "stages/tiny-expert"\ninputs = { "model.path" = "base" }'
EXPORT = 'export = "base"'
MERGE = "merge = { base = 0.5, two = 0.5 }"
OF_A_MERGE = {".lock", "events.jsonl", "export", "result.json", "stage"}


def graph_of(tmp_path: Path, two: str, soup: str) -> Graph:
    """Write the graph's file anew, and read it."""
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH.format(runs=tmp_path / "runs", two=two, soup=soup))
    return load_graph(file)


def put_export(directory: Path, mark: str = "") -> None:
    """Make a checkpoint, as far as it is looked at here. mark: tells one from others."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(assets.root() / "tests" / "stages" / "config.json", directory)
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "mark").write_text(mark)


def finish(graph: Graph, name: str) -> None:
    """As if the stage had been made."""
    run_dir = graph.run_dir(name)
    records = Records(graph)
    if graph.table.stages[name].recipe is None:
        records.begin_merge(name, records.text_for_run(name, goes_on=False))
    else:
        records.begin(name)
        started = run_dir.begin()
        (started.logs / "controller.log").write_text("of the run")
        run_dir.step_checkpoint(2).mkdir()
        run_dir.metrics.write_text('{"step": 0}\n')
        append_event(run_dir.events, "started")
        write_resolved(run_dir.config, graph.resolve(name))
    put_export(run_dir.export, graph.kind(name))
    run_dir.result.write_text('{"seconds": 1.0}')


def finish_all(tmp_path: Path, two: str, soup: str) -> Graph:
    graph = graph_of(tmp_path, two, soup)
    for name in graph.order:
        finish(graph, name)
    assert set(states(graph).values()) == {"done"}
    return graph


def states(graph: Graph) -> dict[str, str]:
    records = Records(graph)
    return {name: str(records.state(name)) for name in graph.order}


def files_of(run_dir: RunDir) -> dict[str, bytes]:
    """Every file but the lock, which whoever asks for it may make."""
    files = {}
    for path in run_dir.root.rglob("*"):
        if path.is_file() and path != run_dir.lock:
            files[str(path.relative_to(run_dir.root))] = path.read_bytes()
    return files


def merges(parts, directory, dtype=None):
    """In place of `merge_checkpoints`."""
    put_export(directory, "merged")


# --- a run that is none now


def test_a_run_that_became_an_export_leaves_its_logs_alone(tmp_path, monkeypatch, capsys):
    finish_all(tmp_path, RUN, MERGE)
    graph = graph_of(tmp_path, EXPORT, MERGE)
    run_dir = graph.run_dir("two")
    (run_dir.root / "slurm").mkdir()
    (run_dir.slurm / "job").write_text("7")
    monkeypatch.setattr(slurm, "state_of", lambda job: {})
    assert states(graph) == {"base": "done", "two": "ready", "soup": "waiting"}
    assert main(["stages", "status", str(graph.file.path)]) == 0
    assert "changed: its kind, was rl" in " ".join(capsys.readouterr().out.split())

    seen = []

    def merges_beside(parts, directory, dtype=None):
        seen.append(run_dir.config.exists() and run_dir.result.exists())
        merges(parts, directory)

    monkeypatch.setattr(merge, "merge_checkpoints", merges_beside)
    said = []
    assert run_graph(graph, said.append, only="two") == 0
    assert said == ["two: export, anew (changed: its kind, was rl)"]
    assert seen == [True]  # until then the run was whole
    assert {path.name for path in run_dir.root.iterdir()} == OF_A_MERGE | {"logs", "slurm"}
    assert (run_dir.root / "logs" / "1" / "controller.log").read_text() == "of the run"
    assert (run_dir.export / "mark").read_text() == "merged"
    assert states(graph)["two"] == "done" and Records(graph).changed_since("two") == ""

    assert main(["resume", str(run_dir.root)]) == ConfigError.exit_code
    assert "is not a run" in capsys.readouterr().err
    assert (run_dir.export / "mark").read_text() == "merged"
    runs = data_of(write_report(str(graph.file.path)))["runs"]
    assert [run["name"] for run in runs] == ["base"]


@pytest.mark.parametrize("why", ["refused", "locked"])
def test_an_export_that_is_not_made_leaves_the_run_as_it_was(tmp_path, monkeypatch, capfd, why):
    finish_all(tmp_path, RUN, MERGE)
    graph = graph_of(tmp_path, EXPORT, MERGE)
    run_dir = graph.run_dir("two")
    before = files_of(run_dir)

    def refuse(*_):
        raise CheckpointError("no finite numbers")

    monkeypatch.setattr(merge, "merge_checkpoints", refuse)
    if why == "locked":
        with run_lock(run_dir):
            assert run_graph(graph, print, only="two") == RunLockedError.exit_code
        assert "is being written by" in capfd.readouterr().err
    else:
        assert run_graph(graph, print, only="two") == CheckpointError.exit_code
    assert files_of(run_dir) == before
    assert states(graph)["two"] == "ready"
    assert set(states(graph_of(tmp_path, RUN, MERGE)).values()) == {"done"}


@pytest.mark.parametrize("place", ["clear_directory", "replace_directory"])
def test_an_export_that_is_killed_while_it_replaces_a_run_is_made_anew(
    tmp_path, monkeypatch, place
):
    finish_all(tmp_path, RUN, MERGE)
    graph = graph_of(tmp_path, EXPORT, MERGE)
    monkeypatch.setattr(merge, "merge_checkpoints", merges)

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, place, kill)
        run_graph(graph, print, only="two")
    assert states(graph)["two"] == "ready" and Records(graph).result("two") == {}
    assert states(graph_of(tmp_path, RUN, MERGE))["two"] == "ready"
    graph = graph_of(tmp_path, EXPORT, MERGE)
    assert run_graph(graph, print, only="two") == 0
    run_dir = graph.run_dir("two")
    assert {path.name for path in run_dir.root.iterdir()} == OF_A_MERGE | {"logs"}
    assert states(graph)["two"] == "done"


def test_an_export_that_has_kept_the_run_before_it_is_made_anew(tmp_path, monkeypatch):
    """As it was made once: a resume of the run may have written it since."""
    finish_all(tmp_path, RUN, MERGE)
    graph = graph_of(tmp_path, EXPORT, MERGE)
    records = Records(graph)
    records.begin_merge("two", records.text_for_run("two", goes_on=False))
    graph.run_dir("two").result.write_text('{"seconds": 1.0}')
    assert records.changed_since("two") == "changed: its kind, was rl"
    assert states(graph) == {"base": "done", "two": "ready", "soup": "waiting"}
    graph.run_dir("two").config.write_text("{")
    assert Records(graph).changed_since("two") == "changed: its kind, was that of a run"


def test_a_run_of_an_earlier_release_that_became_an_export_has_changed(tmp_path):
    graph = finish_all(tmp_path, RUN, MERGE)
    graph.run_dir("two").stage_record.write_text("0123456789abcdef" * 4)
    assert states(graph)["two"] == "done"
    graph = graph_of(tmp_path, EXPORT, MERGE)
    assert Records(graph).changed_since("two") == "changed: its kind, was rl"


def test_a_run_by_hand_in_the_place_of_an_export_is_told(tmp_path, monkeypatch):
    graph = finish_all(tmp_path, RUN, MERGE)
    graph.run_dir("two").stage_record.unlink()
    graph = graph_of(tmp_path, EXPORT, MERGE)
    monkeypatch.setattr(merge, "merge_checkpoints", merges)
    said = []
    assert run_graph(graph, said.append, only="two") == 0
    assert said == ["two: export, anew (the graph did not begin the run that is there)"]
    assert (graph.run_dir("two").root / "logs" / "1" / "controller.log").exists()
    assert states(graph)["two"] == "done"


# --- a merge that is a run now


@pytest.fixture
def in_this_process(monkeypatch):
    """Stages begin in this process, and their runs start no others."""

    def begin(resolved, run_dir, in_job):
        write_resolved(run_dir.config, resolved)
        return 3

    monkeypatch.setattr(local, "_run", begin)
    monkeypatch.setattr(local, "_refuse_unbound", lambda *_, **__: None)
    monkeypatch.setattr(InterruptForwarder, "run", lambda self, command, **_: main(command[3:]))


@pytest.mark.parametrize("kind", ["merge", "export", "merge or export"])
@pytest.mark.parametrize("has_ended", [True, False])
def test_a_merge_that_became_a_run_begins(tmp_path, in_this_process, capsys, kind, has_ended):
    soup = {"export": EXPORT}.get(kind, MERGE)
    graph = finish_all(tmp_path, RUN, soup)
    run_dir = graph.run_dir("soup")
    if kind == "merge or export":
        run_dir.stage_record.write_text("0123456789abcdef" * 4)  # of an earlier release
    if not has_ended:
        run_dir.result.unlink()
        run_dir.export.rename(run_dir.root / "export.partial")
    graph = graph_of(tmp_path, RUN, RUN)
    assert states(graph)["soup"] == "ready"
    assert main(["stages", "status", str(graph.file.path)]) == 0
    assert f"changed: its kind, was {kind}" in " ".join(capsys.readouterr().out.split())
    said = []
    assert run_graph(graph, said.append, only="soup") == 3
    assert said[0] == f"soup: rl, anew (changed: its kind, was {kind})"
    assert {path.name for path in run_dir.root.iterdir()} == {".lock", "config.json", "stage"}
    assert states(graph)["soup"] == "begun" and Records(graph).changed_since("soup") == ""


def test_a_merge_stays_until_the_run_in_its_place_begins(tmp_path, in_this_process, monkeypatch):
    graph = finish_all(tmp_path, RUN, MERGE)
    before = files_of(graph.run_dir("soup"))

    def refuse(*_, **__):
        raise ConfigError("no module 'own_rewards'")

    monkeypatch.setattr(local, "_refuse_unbound", refuse)
    graph = graph_of(tmp_path, RUN, RUN)
    assert run_graph(graph, print, only="soup") == ConfigError.exit_code
    assert files_of(graph.run_dir("soup")) == before
    assert set(states(graph_of(tmp_path, RUN, MERGE)).values()) == {"done"}


def test_only_a_stage_takes_the_place_of_a_merge(tmp_path, in_this_process, capsys):
    graph = finish_all(tmp_path, RUN, MERGE)
    before = files_of(graph.run_dir("soup"))
    arguments = graph.recipe_arguments("two")
    by_hand = ["train", *arguments, f"runs_dir={graph.root}", "name=soup", "--overwrite"]
    assert main(by_hand) == ConfigError.exit_code
    assert "is no run's directory" in capsys.readouterr().err
    assert files_of(graph.run_dir("soup")) == before


@pytest.mark.parametrize("record", ["its own", "0123456789abcdef" * 4, "{}x"])
def test_a_run_that_has_lost_its_configuration_is_no_merge(
    tmp_path, in_this_process, capsys, record
):
    graph = finish_all(tmp_path, RUN, MERGE)
    run_dir = graph.run_dir("two")
    run_dir.config.unlink()
    if record != "its own":
        run_dir.stage_record.write_text(record)
    assert Records(graph).changed_since("two") == ""
    assert run_graph(graph, print, only="two") == ConfigError.exit_code
    assert "is no run's directory" in capsys.readouterr().err
    assert run_dir.step_checkpoint(2).is_dir()


# --- as jobs


@pytest.fixture
def queue(monkeypatch) -> None:
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(slurm, "slurm", lambda *_, **__: "7")
    monkeypatch.setattr(slurm, "state_of", lambda job: {})
    monkeypatch.setattr(runner, "_refuse_what_stages_lack", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("then", "now", "kinds"),
    [
        ((RUN, MERGE), (EXPORT, RUN), ("rl", "merge")),
        ((EXPORT, RUN), (RUN, MERGE), ("export", "rl")),
    ],
)
def test_a_stage_that_is_submitted_anew_says_why(tmp_path, queue, then, now, kinds):
    finish_all(tmp_path, *then)
    graph = graph_of(tmp_path, *now)
    said = []
    assert list(submit_graph(graph, "bare", said.append)) == ["two", "soup"]
    two, soup = kinds
    assert f"two: job 7, anew (changed: its kind, was {two})" in said
    [told] = [text for text in said if text.startswith("soup: job 7")]
    assert told.endswith(f"anew (changed: its kind, was {soup})")
    assert not graph.run_dir("two").export.exists() and not graph.run_dir("soup").export.exists()


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_somebody_writes_is_not_replaced_by_a_job(tmp_path, queue, goes_on):
    graph = finish_all(tmp_path, RUN, MERGE)
    run_dir = graph.run_dir("two")
    if goes_on:
        shutil.rmtree(run_dir.export)
        shutil.rmtree(graph.run_dir("soup").root)
    else:
        graph = graph_of(tmp_path, EXPORT, MERGE)
    before = files_of(run_dir)
    with run_lock(run_dir), pytest.raises(RunLockedError, match="is being written by process"):
        submit_graph(graph, "bare", print)
    assert files_of(run_dir) == before
    assert list((graph.root / "records").glob(".before-*")) == []


def test_a_merge_of_a_job_that_has_ended_is_not_taken_for_one_that_did_not_begin(tmp_path, queue):
    graph = finish_all(tmp_path, RUN, MERGE)
    replaced = ReplacedStages(Records(graph, anew=["soup"]))
    replaced.begin("soup", goes_on=False)  # and the command was killed when its job was queued
    put_export(graph.run_dir("soup").export, "of the job")
    graph.run_dir("soup").result.write_text('{"seconds": 1.0}')
    ReplacedStages(Records(graph)).put_back_left()
    assert (graph.run_dir("soup").export / "mark").read_text() == "of the job"
    assert states(graph)["soup"] == "done"
