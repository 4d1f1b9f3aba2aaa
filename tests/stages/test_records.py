"""What a stage was made from and with: another release, records of earlier ones, stages that are
made anew, and runs of stages that somebody resumes by hand."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import grpo_megatron
from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.config.history import record_settings
from grpo_megatron.config.loader import load_recipe, read_resolved, write_resolved
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.launch import local, slurm
from grpo_megatron.stages import runner
from grpo_megatron.stages.graph import Graph
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.own_files import own_files
from grpo_megatron.stages.records import Records
from grpo_megatron.stages.runner import run_graph, submit_graph
from grpo_megatron.telemetry import made_with
from grpo_megatron.telemetry.events import SETTINGS_TAKEN, append_event
from grpo_megatron.telemetry.made_with import Code, present_code, record_code

GRAPH = """
name = "tiny"
runs_dir = "{runs}"

[stages.base]
recipe = "stages/tiny-base"

[stages.one]
recipe = "stages/tiny-expert"
inputs = {{ "model.path" = "base" }}
settings = ["optimizer.lr=1e-4"]

[stages.two]
recipe = "stages/tiny-expert"
inputs = {{ "model.path" = "base" }}

[stages.soup]
merge = {{ one = 0.5, two = 0.5 }}
"""
NAMES = ("base", "one", "two", "soup")
OTHER = Code("0.0.9", "ab" * 32)


@pytest.fixture
def graph_file(tmp_path) -> Path:
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH.format(runs=tmp_path / "runs"))
    return file


def finish(graph: Graph, name: str, *, code: Code | None = None, records=None) -> None:
    """As if the stage had run from its beginning, by some code."""
    run_dir = graph.run_dir(name)
    shutil.rmtree(run_dir.root, ignore_errors=True)
    (records or Records(graph)).begin(name)
    if graph.table.stages[name].recipe is not None:
        write_resolved(run_dir.config, graph.resolve(name))
    if code is not None:
        append_event(run_dir.events, "code", version=code.version, digest=code.digest)
    run_dir.export.mkdir(parents=True)
    shutil.copy(assets.root() / "tests" / "stages" / "config.json", run_dir.export)
    (run_dir.export / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    run_dir.result.write_text('{"seconds": 1.0}')


def finish_all(graph_file: Path, code: Code | None = None) -> Graph:
    graph = load_graph(graph_file)
    for name in NAMES:
        finish(graph, name, code=code)
    return graph


def replace_in(file: Path, old: str, new: str) -> Graph:
    """Change a graph's file."""
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return load_graph(file)


def states(graph: Graph) -> dict[str, str]:
    records = Records(graph)
    return {name: str(records.state(name)) for name in graph.order}


# --- other code


def test_a_stage_that_other_code_made_stays_done_and_says_so(graph_file, capsys):
    graph = finish_all(graph_file, OTHER)
    assert set(states(graph).values()) == {"done"}
    said = []
    assert run_graph(graph, said.append, only="base") == 0
    assert "done and unchanged, but made by other code: 0.0.9, code ababababab" in said[0]
    assert f"now {present_code()}" in said[0] and "--anew base" in said[0]
    assert main(["stages", "status", str(graph_file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "made by other code: 0.0.9, code ababababab" in told
    assert f"stages run {graph_file} --anew base" in told


def test_a_stage_that_this_code_made_says_nothing(graph_file, capsys):
    graph = finish_all(graph_file, present_code())
    said = []
    assert run_graph(graph, said.append, only="base") == 0
    assert said == ["base: done and unchanged"]
    assert main(["stages", "status", str(graph_file)]) == 0
    assert "--anew" not in capsys.readouterr().out


def test_a_stage_that_goes_on_with_other_code_says_so(graph_file, monkeypatch):
    graph = load_graph(graph_file)
    finish(graph, "base", code=OTHER)
    graph.run_dir("base").result.unlink()
    monkeypatch.setattr(runner, "_run_stage", lambda *_, **__: 3)
    said = []
    assert run_graph(graph, said.append, only="base") == 3
    assert said[0].startswith("base: rl, goes on; made by other code: 0.0.9")
    record_code(graph.run_dir("base").events)
    [note] = Records(graph).notes("base")
    assert note.startswith("made in part by other code: 0.0.9")


def test_a_merge_records_its_code(graph_file, monkeypatch):
    graph = finish_all(graph_file)
    finish(graph, "soup", code=OTHER)
    monkeypatch.setattr(
        "grpo_megatron.checkpoints.merge.merge_checkpoints", lambda *_: finish_export(graph)
    )
    assert run_graph(graph, print, only="soup", anew=["soup"]) == 0
    assert made_with.recorded_codes(graph.run_dir("soup").events) == [present_code()]
    assert states(graph)["soup"] == "done" and Records(graph).notes("soup") == []


def finish_export(graph: Graph) -> None:
    graph.run_dir("soup").export.mkdir(parents=True, exist_ok=True)


def edit_values(graph: Graph, name: str, key: str, value: object, kind: str) -> None:
    """Have a run's config.json be as a release writes it that has another value of `[watch]`."""
    file = graph.run_dir(name).config
    values = json.loads(file.read_text())
    values["config"]["watch"][key] = value
    values["provenance"][f"watch.{key}"] = {"kind": kind, "where": ""}
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("key", ["silent_s", "unknown_here"])
def test_defaults_of_another_release_change_no_stage(graph_file, key):
    graph = finish_all(graph_file, OTHER)
    edit_values(graph, "base", key, 77.5, "default")
    assert set(states(graph).values()) == {"done"}
    [note] = Records(graph).notes("base")
    assert note.endswith(f"with another default of watch.{key}")
    edit_values(graph, "base", key, 77.5, "recipe")
    assert Records(graph).changed_since("base") == f"changed: watch.{key}"
    assert states(graph)["base"] == "ready"


def test_the_library_is_no_code_of_the_user_s_in_its_own_checkout(monkeypatch):
    monkeypatch.chdir(Path(grpo_megatron.__file__).parent.parent)
    reward = """domains.0.rewards=[{function="grpo_megatron.rewards.judge:judge"}]"""
    config = load_recipe("stages/tiny-base", [reward]).config
    assert config.domains[0].rewards[0].function.startswith("grpo_megatron.")
    assert own_files(config) == []


# --- records of earlier releases


def as_earlier_release(graph: Graph, *names: str) -> None:
    """Have stages be recorded as a release did that put everything into one digest."""
    for name in names:
        graph.run_dir(name).stage_record.write_text("0123456789abcdef" * 4)


def test_a_stage_of_an_earlier_release_stays_done_and_says_so(graph_file):
    graph = finish_all(graph_file)
    as_earlier_release(graph, *NAMES)
    assert set(states(graph).values()) == {"done"}
    said = []
    assert run_graph(graph, said.append, only="one") == 0
    assert "recorded by an earlier release, without its code" in said[0]
    assert "--anew one" in said[0]


def test_a_stage_of_an_earlier_release_with_other_settings_is_made_anew(graph_file):
    graph = finish_all(graph_file)
    as_earlier_release(graph, *NAMES)
    graph = replace_in(graph_file, "lr=1e-4", "lr=2e-4")
    assert states(graph) == {"base": "done", "one": "ready", "two": "done", "soup": "waiting"}
    assert Records(graph).changed_since("one") == "changed: optimizer.lr"


def test_what_is_newer_than_a_stage_of_an_earlier_release_has_changed_it(
    graph_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own_rewards.py"
    own.write_text("x = 1")
    recipe = 'recipe = "stages/tiny-base"'
    reward = """settings = ['domains.0.rewards=[{function="own_rewards:score"}]']"""
    replace_in(graph_file, recipe, f"{recipe}\n{reward}")
    graph = finish_all(graph_file)
    as_earlier_release(graph, *NAMES)
    begun_ns = graph.run_dir("base").stage_record.stat().st_mtime_ns
    os.utime(own, ns=(begun_ns, begun_ns))
    assert states(graph)["base"] == "done"
    os.utime(own, ns=(begun_ns + 1, begun_ns + 1))
    assert Records(graph).changed_since("base") == f"changed: {own.name}"


def test_a_stage_of_an_earlier_release_follows_the_one_that_it_was_built_on(graph_file):
    graph = finish_all(graph_file)
    as_earlier_release(graph, *NAMES)
    finish(graph, "base")
    later_ns = graph.run_dir("two").stage_record.stat().st_mtime_ns + 10**9
    os.utime(graph.run_dir("base").stage_record, ns=(later_ns, later_ns))
    assert states(graph)["base"] == "done"
    assert Records(graph).changed_since("one") == "changed: stage base"


# --- made anew


class FakeStages:
    """In place of processes: a stage ends well at once, or fails and leaves all as it was."""

    def __init__(self, *failing: str):
        self.failing = failing
        self.made: list[str] = []

    def __call__(self, graph, records, name, interrupts, *, resume):
        assert not resume
        if name in self.failing:
            return 10
        finish(graph, name, records=records)
        self.made.append(name)
        return 0


def test_a_stage_that_is_made_anew_takes_what_builds_on_it_along(graph_file, monkeypatch):
    graph = finish_all(graph_file)
    fake = FakeStages()
    monkeypatch.setattr(runner, "_run_stage", fake)
    said = []
    assert run_graph(graph, said.append, anew=["one"]) == 0
    assert fake.made == ["one", "soup"]
    assert "one: rl, anew (as asked for)" in said
    assert "soup: merge, anew (changed: stage one)" in said
    assert set(states(graph).values()) == {"done"}


def test_what_builds_on_a_stage_that_was_made_anew_is_not_done_later_either(
    graph_file, monkeypatch
):
    graph = finish_all(graph_file)
    monkeypatch.setattr(runner, "_run_stage", FakeStages("one", "two"))
    assert run_graph(graph, print, anew=["base"]) == 10
    assert states(graph) == {"base": "done", "one": "ready", "two": "ready", "soup": "waiting"}


def test_a_stage_that_cannot_be_made_anew_is_what_it_was(graph_file, monkeypatch):
    graph = finish_all(graph_file)
    fake = FakeStages("base")
    monkeypatch.setattr(runner, "_run_stage", fake)
    assert run_graph(graph, print, anew=["base"]) == 10
    assert fake.made == [] and set(states(graph).values()) == {"done"}


def test_stages_are_submitted_anew(graph_file, monkeypatch):
    graph = finish_all(graph_file)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(slurm, "slurm", lambda *_, **__: "7")
    monkeypatch.setattr(slurm, "state_of", lambda job: {})
    assert list(submit_graph(graph, "bare", print)) == []
    assert list(submit_graph(graph, "bare", print, anew=["two"])) == ["two", "soup"]
    assert not graph.run_dir("two").export.exists() and graph.run_dir("one").export.exists()


@pytest.mark.parametrize("command", [["run"], ["submit", "--site", "bare"]])
def test_a_name_of_no_stage_is_told(graph_file, capsys, command):
    verb, *flags = command
    assert main(["stages", verb, str(graph_file), *flags, "--anew", "bsae"]) == 2
    said = capsys.readouterr().err
    assert "no stage is called 'bsae'" in said and "'base'" in said


# --- resumed by hand


@pytest.fixture
def without_processes(monkeypatch):
    """What is resumed takes its settings, and ends."""

    def take(resolved, run_dir, in_job):
        write_resolved(run_dir.config, resolved)
        append_event(run_dir.events, SETTINGS_TAKEN, step=0)
        return 0

    monkeypatch.setattr(local, "_run", take)
    monkeypatch.setattr(local, "_refuse_unbound", lambda *_, **__: None)


def test_a_stage_that_was_resumed_with_other_settings_is_another_one(
    graph_file, capsys, without_processes
):
    graph = finish_all(graph_file)
    run_dir = graph.run_dir("base")
    assert local.resume(run_dir.root, ["seed=4"]) == 0
    said = capsys.readouterr().err
    assert "is a stage of a graph, with another seed from here on" in said
    assert states(graph)["base"] == "ready"
    assert Records(graph).changed_since("base") == "changed: seed"
    recipe = 'recipe = "stages/tiny-base"'
    graph = replace_in(graph_file, recipe, f'{recipe}\nsettings = ["seed=4"]')
    assert states(graph) == {"base": "done", "one": "ready", "two": "ready", "soup": "waiting"}
    assert Records(graph).changed_since("one") == "changed: stage base"


@pytest.mark.parametrize("overrides", [[], ["seed=0", "telemetry.tensorboard=true"]])
def test_a_stage_that_was_resumed_with_the_same_settings_is_the_same(
    graph_file, capsys, without_processes, overrides
):
    graph = finish_all(graph_file)
    assert read_resolved(graph.run_dir("base").config).config.seed == 0
    assert local.resume(graph.run_dir("base").root, overrides) == 0
    assert set(states(graph).values()) == {"done"}
    assert "is a stage" not in capsys.readouterr().err


def test_a_stage_whose_settings_were_refused_is_what_it_was(graph_file, monkeypatch):
    graph = finish_all(graph_file)
    monkeypatch.setattr(local, "_refuse_unbound", lambda *_, **__: None)
    monkeypatch.setattr(
        "grpo_megatron.launch.resuming._newest_checkpoint", lambda *_: ("somewhere", {})
    )
    monkeypatch.setattr(local, "resolve_resumed", lambda run_dir, flags: changed_seed(run_dir))

    def refuse(resolved, run_dir, in_job):
        write_resolved(run_dir.config, resolved)
        raise DataError("of another seed")

    monkeypatch.setattr(local, "_run", refuse)
    with pytest.raises(DataError):
        local.resume(graph.run_dir("base").root, ["seed=4"])
    assert set(states(graph).values()) == {"done"}


def changed_seed(run_dir):
    return read_resolved(run_dir.config, ["seed=4"])


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_job_that_resumes_a_stage_with_other_settings_makes_it_another_one(
    graph_file, capsys, monkeypatch, is_refused
):
    graph = finish_all(graph_file)
    run_dir = graph.run_dir("base")

    def submit(run_dir):
        if is_refused:
            raise ConfigError("invalid account")
        return "7"

    monkeypatch.setattr(slurm, "submit_again", submit)
    monkeypatch.setattr(slurm, "active_job", lambda run_dir: None)
    if is_refused:
        with pytest.raises(ConfigError, match="invalid account"):
            slurm.resume(run_dir.root, ["seed=4"])
        assert set(states(graph).values()) == {"done"}
        return
    assert slurm.resume(run_dir.root, ["seed=4"]) == "7"
    assert "is a stage of a graph, with another seed" in capsys.readouterr().err
    assert states(graph)["base"] == "ready"
    assert Records(graph).changed_since("one") == "changed: stage base"


def test_steps_that_had_other_settings_are_told(graph_file):
    graph = finish_all(graph_file)
    run_dir = graph.run_dir("base")
    write_resolved(run_dir.config, read_resolved(run_dir.config, ["seed=4"]))
    record_settings(run_dir, 0)
    write_resolved(run_dir.config, graph.resolve("base"))
    record_settings(run_dir, 3)
    assert states(graph)["base"] == "done"
    assert Records(graph).notes("base") == ["its first steps had another seed"]
