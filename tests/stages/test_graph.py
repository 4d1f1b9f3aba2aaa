"""Graphs: what is refused, what each stage is given, and what is repeated after a change."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron import assets
from grpo_megatron.checkpoints import merge
from grpo_megatron.cli.main import main
from grpo_megatron.config.gates import parse_gate
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RUN_NAME
from grpo_megatron.errors import ConfigError, GateError, GrpoMegatronError, RunLockedError
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.stages import inputs as inputs_module
from grpo_megatron.stages import loading, runner
from grpo_megatron.stages.interrupts import InterruptForwarder
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.own_files import own_files
from grpo_megatron.stages.records import Records, State
from grpo_megatron.stages.replaced import ReplacedStages
from grpo_megatron.stages.runner import run_graph, submit_graph

GRAPH = """
name = "tiny"
runs_dir = "{runs}"

[stages.base]
recipe = "stages/tiny-base"

[stages.one]
recipe = "stages/tiny-expert"
inputs = {{ "model.path" = "base" }}
settings = ["domains.0.weight=0", "optimizer.lr=1e-4"]
gates = ["eval.plus.accuracy >= 0.6", "no domain drops more than 0.02 against base"]

[stages.two]
recipe = "stages/tiny-expert"
inputs = {{ "model.path" = "base" }}

[stages.soup]
merge = {{ one = 0.5, two = 0.5 }}

[stages.final]
export = "soup"
dtype = "bfloat16"
"""


@pytest.fixture
def graph_file(tmp_path) -> Path:
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH.format(runs=tmp_path / "runs"))
    return file


def changed(file: Path, old: str, new: str) -> Path:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    return file


WITHOUT_TENSORS = (2).to_bytes(8, "little") + b"{}"


def begin(graph, name: str) -> None:
    """As if the stage had just started."""
    Records(graph).begin(name)
    if graph.table.stages[name].recipe is not None:
        write_resolved(graph.run_dir(name).config, graph.resolve(name))


def finish(graph, name: str, **accuracies: float) -> None:
    """As if the stage had run."""
    begin(graph, name)
    run_dir = graph.run_dir(name)
    run_dir.export.mkdir(parents=True, exist_ok=True)
    shutil.copy(assets.root() / "tests" / "stages" / "config.json", run_dir.export)
    (run_dir.export / "model.safetensors").write_bytes(WITHOUT_TENSORS)
    run_dir.result.write_text(
        json.dumps(
            {
                "seconds": 1.0,
                "eval": {domain: {"accuracy": value} for domain, value in accuracies.items()},
            }
        )
    )


def test_order_and_levels(graph_file):
    graph = load_graph(graph_file)
    assert graph.levels() == [["base"], ["one", "two"], ["soup"], ["final"]]
    assert [graph.kind(name) for name in graph.order] == ["rl", "rl", "rl", "merge", "export"]


def test_a_stage_gets_settings_inputs_and_gates(graph_file):
    graph = load_graph(graph_file)
    config = graph.resolve("one").config
    assert config.model.path == graph.output("base") and config.model.preset is None
    assert [d.weight for d in config.domains] == [0, 1, 1] and config.optimizer.lr == 1e-4
    assert config.runs_dir / config.name == graph.run_dir("one").root
    assert config.gates[1].endswith(f"against {graph.run_dir('base').root}")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"model.path" = "base"', '"model.path" = "bsae"', ["'bsae', which is no stage", "'base'"]),
        (
            'export = "soup"',
            'export = "soup"\nmerge = { one = 1.0 }',
            ["exactly one of recipe, merge"],
        ),
        ('recipe = "stages/tiny-base"', 'recipe = "stages/tiny-bas"', ["no recipe", "tiny-base"]),
        (
            'recipe = "stages/tiny-base"',
            'recipe = "stages/tiny-base"\nneeds = "x"',
            ["stages.base"],
        ),
        ("[stages.base]", "[stages.records]\nmerge = { one = 1.0 }\n[stages.base]", ["'records'"]),
        (
            'recipe = "stages/tiny-base"',
            'recipe = "stages/tiny-base"\ninputs = {"model.path" = "final"}',
            ["wait for each other"],
        ),
        ("optimizer.lr", "optimizer.lrr", ["optimizer.lrr", "unknown key", "optimizer.lr"]),
        (
            "accuracy >= 0.6",
            "accuracy is 0.6",
            ["is not a gate", "eval.DOMAIN.METRIC", "stage one, ", "graph.toml:12"],
        ),
        (
            "[stages.base]\n",
            '[stages.other]\nrecipe = "stages/tiny-gsm8k"\n'
            '[stages.compared]\nrecipe = "stages/tiny-base"\n'
            'gates = ["no domain drops more than 0.1 against other"]\n[stages.base]\n',
            ["of stage compared can never be open", "other evaluates gsm8k"],
        ),
        (
            'recipe = "stages/tiny-base"',
            'recipe = "stages/tiny-base"\nsettings = ["data.num_heldout=0"]',
            ["of stage one can never be open", "num_heldout of base is 0"],
        ),
        (
            '"model.path" = "base" }\nsettings',
            '"domains.0.path" = "base" }\nsettings',
            ["takes a data set", "gives a checkpoint"],
        ),
        ("dtype =", 'settings = ["seed=1"]\ndtype =', ["stage final takes no settings"]),
        (
            'optimizer.lr=1e-4"]',
            'optimizer.lr=1e-4"]\ndtype = "float16"',
            ["stage one takes no dtype"],
        ),
        ("[stages.final]", 'gates = ["seconds <= -5"]\n[stages.final]', ["soup", "below 0"]),
        ("two = 0.5", "two = -0.5", ["stages.soup.merge.two", "must be more than 0"]),
        (
            "eval.plus",
            "eval.pluss",
            ["measures 'eval.pluss.accuracy'", "did you mean 'eval.plus.accuracy'"],
        ),
        ("plus.accuracy", "plus.acuracy", ["'eval.plus.acuracy'", "'eval.plus.accuracy'"]),
        ("accuracy >= 0.6", "accuracy >= 1.6", ["no accuracy is", "between 0 and 1"]),
        (
            'export = "soup"',
            'export = "soup"\ngates = ["eval.all.accuracy >= 0.5"]',
            ["of stage final can never be open", "nothing is evaluated in final"],
        ),
        (
            'recipe = "stages/tiny-expert"\ninputs = { "model.path" = "base" }\n\n[stages.soup]',
            'recipe = "stages/tiny-expert"\ninputs = { "model.path" = "base" }\n'
            'gates = ["no domain drops more than 0.1 against early"]\n\n'
            '[stages.early]\nexport = "base"\n\n[stages.soup]',
            ["of stage two can never be open", "nothing is evaluated in early"],
        ),
        (
            'export = "soup"\ndtype = "bfloat16"',
            'export = "data"\n[stages.data]\nrecipe = "stages/tiny-base"\n'
            'settings = ["kind=rejection_sample", "num_steps=0", "cold_start=null"]',
            ["takes a checkpoint", "gives a data set"],
        ),
    ],
)
def test_a_wrong_graph_is_one_message(graph_file, old, new, words):
    with pytest.raises(ConfigError) as error:
        load_graph(changed(graph_file, old, new))
    assert all(word in str(error.value) for word in words), str(error.value)


def merge_called(name: str, folder: Path) -> Path:
    """Return the file of a graph in which a merge has this name."""
    file = folder / "graph.toml"
    table = f"[stages.{as_toml(name)}]\nmerge = {{ one = 1.0 }}\n"
    file.write_text(GRAPH.format(runs=folder / "runs") + table)
    return file


NO_DIRECTORIES = ("", ".", "..", "../evil", "a/b", "/absolute", ".lock", " x y", "[bold]", "l\nm")


@pytest.mark.parametrize("name", [*NO_DIRECTORIES, "ü", "records", "report.html"])
def test_a_stage_has_a_directory_of_its_own_in_the_graph(tmp_path, name):
    with pytest.raises(ConfigError, match="a stage cannot be called") as error:
        load_graph(merge_called(name, tmp_path))
    assert str(tmp_path / "graph.toml") in str(error.value)


def test_a_name_beside_a_wrong_one_is_told(tmp_path):
    with pytest.raises(ConfigError, match="for example 'demo-v2'"):
        load_graph(merge_called("../demo v2", tmp_path))


@settings(max_examples=30)
@given(st.from_regex(RUN_NAME, fullmatch=True) | st.text(st.sampled_from("./\\ \n~a-"), min_size=1))
def test_no_accepted_name_leads_out_of_the_graph(name):
    with tempfile.TemporaryDirectory() as folder:
        file = merge_called(name, Path(folder))
        try:
            graph = load_graph(file)
        except ConfigError:
            return
        assert graph.run_dir(name).root.resolve().parent == graph.root.resolve()


WITH_A_CRITIC = """
name = "critic"
runs_dir = "{runs}"

[stages.scorer]
recipe = "stages/tiny-reward-model"

[stages.policy]
recipe = "demo/ppo-moe-cpu"
inputs = {{ "critic.path" = "scorer" }}
"""


def test_a_critic_begins_with_the_reward_model_of_an_earlier_stage(tmp_path):
    file = tmp_path / "graph.toml"
    file.write_text(WITH_A_CRITIC.format(runs=tmp_path / "runs"))
    graph = load_graph(file)
    assert graph.levels() == [["scorer"], ["policy"]]
    critic = graph.resolve("policy").config.critic
    assert critic is not None and critic.path == graph.output("scorer")
    assert Records(graph).inputs("policy").preset
    other = 'settings = ["model.preset=qwen3-8b", "trainer.expert_parallel_size=1"]'
    changed(
        file, 'recipe = "stages/tiny-reward-model"', f'recipe = "stages/tiny-reward-model"\n{other}'
    )
    with pytest.raises(ConfigError, match="of stage scorer is another: model_type") as told:
        load_graph(file)
    assert "critic.path of stage policy" in str(told.value)


AS_TEACHERS = """
[stages.other]
recipe = "stages/tiny-base"
settings = ["model.preset=qwen3-8b", "trainer.expert_parallel_size=1"]

[stages.student]
recipe = "stages/tiny-distil"

[stages.student.inputs]
"model.path" = "base"
"distillation.teachers.0.path" = "one"
"distillation.teachers.1.path" = "{second}"
"distillation.teachers.2.path" = "two"
"""
MIXED = """
[stages.mixed]
merge = { one = 1, other = 1 }
"""


@pytest.mark.parametrize(
    ("second", "more", "message"),
    [
        ("other", "", "distillation.teachers.1.path of stage student .* that of stage other"),
        ("two", MIXED, "mixed merges models that do not descend from one: other: .* model of one"),
        ("two", "", None),
    ],
)
def test_what_stages_teach_and_merge_is_of_one_model(graph_file, second, more, message):
    """Known before any of them is trained, by what they descend from."""
    graph_file.write_text(graph_file.read_text() + AS_TEACHERS.format(second=second) + more)
    if message is None:
        load_graph(graph_file)
        return
    with pytest.raises(ConfigError, match=message):
        load_graph(graph_file)


def test_a_problem_of_a_recipe_says_of_which_stage_it_is(graph_file):
    """Several stages of a graph may have one recipe."""
    changed(graph_file, '"optimizer.lr=1e-4"', '"optimzer.lr=1e-4"')
    with pytest.raises(ConfigError, match=r"did you mean|optimizer\.lr") as told:
        load_graph(graph_file)
    assert re.fullmatch(rf"stage one, {re.escape(str(graph_file))}:\d+", told.value.where)


WITH_REWARD_MODELS = """
name = "scalars"
runs_dir = "{runs}"

[stages.scorer]
recipe = "stages/tiny-reward-model"

[stages.again]
recipe = "stages/tiny-reward-model"
inputs = {{ "model.path" = "scorer" }}

[stages.mean]
merge = {{ scorer = 1.0, again = 1.0 }}

[stages.policy]
recipe = "stages/tiny-preferences"

[stages.last]
recipe = "stages/tiny-preferences"
inputs = {{ "model.path" = "policy" }}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"model.path" = "policy"', '"model.path" = "scorer"', "stage scorer gives a reward model"),
        ('"model.path" = "policy"', '"model.path" = "mean"', "stage mean gives a reward model"),
        (
            '"model.path" = "policy"',
            '"preferences.reference" = "again"',
            "preferences.reference of stage last takes a language model",
        ),
        ("again = 1.0", "policy = 1.0", "the reward model of stage scorer with the language model"),
    ],
)
def test_a_reward_model_is_no_language_model(tmp_path, old, new, words):
    file = tmp_path / "graph.toml"
    file.write_text(WITH_REWARD_MODELS.format(runs=tmp_path / "runs"))
    load_graph(file)
    with pytest.raises(ConfigError, match=words):
        load_graph(changed(file, old, new))


WITH_OTHER_SCALARS = """
name = "heads"
runs_dir = "{runs}"

[stages.answers]
recipe = "stages/tiny-reward-model"

[stages.steps]
recipe = "stages/tiny-process-reward-model"

[stages.labels]
recipe = "stages/tiny-reward-labels"

[stages.early]
export = "answers"

{more}
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "[stages.mean]\nmerge = {{ answers = 1, {other} = 1 }}",
            ["stage mean merges reward models", "{other}: the scalars of its head are "],
        ),
        (
            "[stages.mean]\nmerge = {{ {other} = 1, early = 1 }}",
            ["stage mean merges reward models", "early: the scalars of its head are "],
        ),
    ],
)
@pytest.mark.parametrize("other", ["steps", "labels"])
def test_reward_models_of_other_scalars_are_not_merged(tmp_path, other, more, words):
    """A score of an answer and how likely a step is right have no mean, nor have other labels."""
    error = graph_with(tmp_path, more.format(other=other))
    assert error is not None and "preferences.loss" in error.remedy
    for word in words:
        assert word.format(other=other) in error.message


def test_process_reward_models_that_score_at_other_tokens_are_not_merged(tmp_path):
    more = '[stages.again]\nrecipe = "stages/tiny-process-reward-model"\n{settings}'
    more += "[stages.mean]\nmerge = {{ steps = 1, again = 1 }}"
    assert graph_with(tmp_path, more.format(settings="")) is None
    settings = 'settings = ["preferences.step_token=!"]\n'
    error = graph_with(tmp_path, more.format(settings=settings))
    assert error is not None and "preferences.step_token" in error.remedy
    assert "again: it scores steps at '!', the reward model of stage steps at '.'" in error.message


def test_reward_models_of_equal_scalars_are_merged(tmp_path):
    more = '[stages.again]\nrecipe = "stages/tiny-reward-labels"\n'
    more += "[stages.mean]\nmerge = { labels = 1, again = 1 }\n[stages.other]\n"
    assert graph_with(tmp_path, more + "merge = { answers = 1, early = 1 }") is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            'recipe = "stages/tiny-reward-model"\ninputs = { "model.path" = "labels" }',
            "model.path of stage last takes the reward model of stage labels: the scalars of its",
        ),
        (
            'recipe = "demo/ppo-moe-cpu"\ninputs = { "critic.path" = "labels" }',
            "its head gives 2 numbers, and a value is one",
        ),
    ],
)
def test_what_begins_with_other_scalars_is_refused_before_they_are_trained(tmp_path, more, words):
    error = graph_with(tmp_path, f"[stages.last]\n{more}")
    assert error is not None and words in error.message


def graph_with(folder, more):
    """What a graph of reward models and further stages is refused with."""
    file = folder / "graph.toml"
    file.write_text(WITH_OTHER_SCALARS.format(runs=folder / "runs", more=more))
    try:
        load_graph(file)
    except ConfigError as error:
        return error
    return None


WITH_ADAPTERS = """
name = "adapters"
runs_dir = "{runs}"

[stages.base]
recipe = "{first}"

[stages.again]
recipe = "demo/lora-moe-cpu"
inputs = {{ "lora.path" = "base" }}
settings = ["cold_start=null"]
"""


def test_adapters_are_taken_from_beside_the_export(tmp_path):
    file = tmp_path / "graph.toml"
    file.write_text(WITH_ADAPTERS.format(runs=tmp_path / "runs", first="demo/lora-moe-cpu"))
    graph = load_graph(file)
    lora = graph.resolve("again").config.lora
    adapter = graph.run_dir("base").export.absolute().with_name("adapter")
    assert lora is not None and lora.path == adapter
    assert graph.input("model.path", "base") == graph.output("base")
    assert Records(graph).inputs("again").preset


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.rank=2", "rank of [lora] is"),
        ("lora.alpha=3.5", "alpha of [lora] is"),
        ("lora.rank_stabilised=true", "rank_stabilised of [lora] is false there and true here"),
        ("lora.dora=true", "dora of [lora] is false there and true here"),
        ('lora.targets=["self_attn"]', "mlp.experts.down_proj"),
        ("lora.experts=shared", "experts share them here"),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path, override, words):
    file = tmp_path / "graph.toml"
    text = WITH_ADAPTERS.format(runs=tmp_path / "runs", first="demo/lora-moe-cpu")
    file.write_text(text.replace('"cold_start=null"', f"\"cold_start=null\", '{override}'"))
    with pytest.raises(ConfigError, match="takes adapters like its own") as error:
        load_graph(file)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "override", ["lora.publish=merged", 'lora.targets=["mlp", "self_attn"]', "lora.alpha=null"]
)
def test_adapters_of_the_same_kind_may_be_named_in_another_way(tmp_path, override):
    file = tmp_path / "graph.toml"
    text = WITH_ADAPTERS.format(runs=tmp_path / "runs", first="demo/lora-moe-cpu")
    file.write_text(text.replace('"cold_start=null"', f"\"cold_start=null\", '{override}'"))
    assert load_graph(file).levels() == [["base"], ["again"]]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("domains.plus.path", "domains has 3 element(s)"),
        ("domains.path", "domains has 3 element(s)"),
        ("name", "takes no input 'name'"),
        ("runs_dir", "takes no input 'runs_dir'"),
    ],
)
def test_an_input_that_no_stage_takes_is_one_message(graph_file, key, words):
    with pytest.raises(ConfigError) as error:
        load_graph(changed(graph_file, '"model.path" = "base" }', f'"{key}" = "base" }}'))
    assert words in str(error.value)


def test_an_input_is_not_set_too(graph_file):
    old = 'settings = ["domains.0.weight=0", "optimizer.lr=1e-4"]'
    changed(graph_file, old, 'settings = ["model.path = /models/other"]')
    with pytest.raises(ConfigError, match="and takes it from stage 'base'") as error:
        load_graph(graph_file)
    assert "take one of both away" in error.value.remedy


@pytest.mark.parametrize("setting", ["name=other", "runs_dir = here"])
@pytest.mark.parametrize("owner", ["stage one", "the graph"])
def test_settings_of_what_the_graph_says_are_refused(graph_file, setting, owner):
    text = f'settings = ["seed=1", "{setting}"]\n'
    if owner == "the graph":
        graph_file.write_text(text + graph_file.read_text())
    else:
        changed(
            graph_file,
            'settings = ["domains.0.weight=0", "optimizer.lr=1e-4"]\n',
            text,
        )
    with pytest.raises(ConfigError) as error:
        load_graph(graph_file)
    assert f"{owner} cannot set '{setting.partition('=')[0].strip()}'" in str(error.value)
    assert str(graph_file) in str(error.value)


def test_arguments_of_a_domain_are_no_data_set(graph_file):
    key = "domains.0.rewards.0.arguments.path"
    changed(graph_file, '"model.path" = "base" }', f'"model.path" = "base", "{key}" = "base" }}')
    graph = load_graph(graph_file)
    arguments = graph.resolve("one").config.domains[0].rewards[0].arguments
    assert arguments["path"] == str(graph.output("base"))


def test_a_stage_without_adapters_gives_none(tmp_path):
    file = tmp_path / "graph.toml"
    file.write_text(WITH_ADAPTERS.format(runs=tmp_path / "runs", first="stages/tiny-base"))
    with pytest.raises(ConfigError, match="takes adapters; stage base"):
        load_graph(file)


def test_an_evaluation_has_no_checkpoint(graph_file):
    changed(
        graph_file,
        'recipe = "stages/tiny-base"',
        'recipe = "stages/tiny-base"\nsettings = ["kind=eval", "cold_start=null"]',
    )
    with pytest.raises(ConfigError, match="gives only numbers"):
        load_graph(graph_file)


def states(graph) -> dict[str, str]:
    records = Records(graph)
    return {name: str(records.state(name)) for name in graph.order}


def test_what_is_done_is_done_until_something_changes(graph_file):
    graph = load_graph(graph_file)
    assert states(graph) == {"base": "ready"} | dict.fromkeys(
        ("one", "two", "soup", "final"), "waiting"
    )
    for name in graph.order:
        finish(graph, name, plus=0.7)
    assert set(states(graph).values()) == {"done"}
    graph = load_graph(changed(graph_file, "lr=1e-4", "lr=2e-4"))
    assert states(graph) == {
        "base": "done",
        "one": "ready",
        "two": "done",
        "soup": "waiting",
        "final": "waiting",
    }
    finish(graph, "one", plus=0.7)
    assert states(graph)["soup"] == "ready"  # its part is another one now


def test_a_merge_of_the_same_parts_in_another_order_is_another_one(graph_file):
    """It takes dtype, configuration and tokenizer of the first."""
    graph = load_graph(graph_file)
    for name in graph.order:
        finish(graph, name, plus=0.7)
    graph = load_graph(changed(graph_file, "one = 0.5, two = 0.5", "two = 0.5, one = 0.5"))
    assert states(graph)["soup"] == "ready" and states(graph)["two"] == "done"


def test_a_last_stage_whose_export_is_gone_is_not_done(graph_file):
    graph = load_graph(graph_file)
    for name in graph.order:
        finish(graph, name, plus=0.7)
    shutil.rmtree(graph.output("final"))
    assert states(graph) == dict.fromkeys(graph.order, "done") | {"final": "begun"}


def test_an_export_may_be_removed_when_all_that_take_it_have_ended(graph_file):
    graph = load_graph(graph_file)
    for name in ("base", "one", "two"):
        finish(graph, name, plus=0.7)
    shutil.rmtree(graph.output("base"))
    assert states(graph)["base"] == "done"
    shutil.rmtree(graph.output("one"))
    assert states(graph)["one"] == "begun" and states(graph)["soup"] == "waiting"
    finish(graph, "one", plus=0.7)
    graph = load_graph(changed(graph_file, "lr=1e-4", "lr=2e-4"))
    assert states(graph)["base"] == "begun" and states(graph)["one"] == "waiting"


def test_what_a_stage_takes_from_a_run_is_what_must_be_there(tmp_path):
    file = tmp_path / "graph.toml"
    file.write_text(WITH_ADAPTERS.format(runs=tmp_path / "runs", first="demo/lora-moe-cpu"))
    graph = load_graph(file)
    finish(graph, "base")
    assert states(graph)["base"] == "begun"
    adapter = graph.run_dir("base").adapter
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert states(graph)["base"] == "begun"
    (adapter / "adapter_model.safetensors").write_bytes(WITHOUT_TENSORS)
    assert states(graph) == {"base": "done", "again": "ready"}


def test_an_evaluation_is_done_without_an_export(graph_file):
    table = (
        '[stages.numbers]\nrecipe = "stages/tiny-base"\n'
        'settings = ["kind=eval", "num_steps=0", "cold_start=null"]\n[stages.base]\n'
    )
    graph = load_graph(changed(graph_file, "[stages.base]\n", table))
    finish(graph, "numbers", plus=0.7)
    shutil.rmtree(graph.output("numbers"))
    assert states(graph)["numbers"] == "done"


def test_a_record_that_is_no_text_is_of_other_inputs(graph_file):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7)
    graph.run_dir("base").stage_record.write_bytes(b"\xff\xfe\x00")
    assert states(graph)["base"] == "ready"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no seconds"),
        ('{"seconds": null}', "no seconds"),
        ('{"seconds": "x"}', "no seconds"),
        ('{"seconds": true}', "no seconds"),
        ('{"eval": [1], "seconds": 1}', "eval is no table"),
        ('{"eval": null, "seconds": 1}', "eval is no table"),
        ('{"eval": {"all": null}, "seconds": 1}', "eval.all is no table"),
        ('{"eval": {"all": {"accuracy": null}}, "seconds": 1}', "eval.all.accuracy is no number"),
    ],
)
def test_what_no_run_writes_as_its_result_is_damaged(graph_file, content, words):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7)
    graph.run_dir("base").result.write_text(content)
    for ask in (Records(graph).state, Records(graph).closed_gates, Records(graph).result):
        with pytest.raises(ConfigError, match=f"damaged: {words}") as error:
            ask("base")
        assert "resume the run" in error.value.remedy


def test_a_stage_that_was_killed_goes_on_only_if_it_is_the_same(graph_file):
    graph = load_graph(graph_file)
    begin(graph, "base")
    assert Records(graph).state("base") is State.PARTIAL
    changed(
        graph_file,
        'recipe = "stages/tiny-base"',
        'recipe = "stages/tiny-base"\nsettings = ["seed=4"]',
    )
    assert Records(load_graph(graph_file)).state("base") is State.READY


def test_a_stage_that_begins_again_has_no_result(graph_file):
    """It would count as done, with the weights of other settings, if it ended at once."""
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7)
    changed(
        graph_file,
        'recipe = "stages/tiny-base"',
        'recipe = "stages/tiny-base"\nsettings = ["seed=4"]',
    )
    graph = load_graph(graph_file)
    begin(graph, "base")
    assert Records(graph).state("base") is State.PARTIAL


def test_gates_of_a_recipe_hold_back_what_builds_on_it(graph_file):
    changed(
        graph_file,
        'recipe = "stages/tiny-base"',
        'recipe = "stages/tiny-base"\nsettings = [\'gates=["eval.plus.accuracy >= 0.9"]\']',
    )
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7)
    assert states(graph)["base"] == "gate closed" and states(graph)["one"] == "waiting"
    assert graph.gates("base") == ("eval.plus.accuracy >= 0.9",)


def test_teachers_and_presets_are_what_a_stage_is_made_from(graph_file, tmp_path, monkeypatch):
    changed(
        graph_file,
        'optimizer.lr=1e-4"',
        f"""kind=distil", 'distillation={{teachers=[{{path="{tmp_path}/teacher"}}]}}'""",
    )
    graph = load_graph(graph_file)
    before = Records(graph).inputs("one")
    (tmp_path / "teacher").mkdir()
    hf = inputs_module.load_preset("tiny-qwen3-moe").hf
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(hf | {"vocab_size": 16}))
    (tmp_path / "teacher" / "model.safetensors").write_text("x")
    assert Records(graph).inputs("one") != before
    before = Records(graph).inputs("one")
    (tmp_path / "teacher" / "shards").mkdir()
    (tmp_path / "teacher" / "shards" / "1.safetensors").write_text("x")
    assert Records(graph).inputs("one") != before
    before = Records(graph).inputs("base")
    other = SimpleNamespace(file=SimpleNamespace(values={"tokenizer": {"alphabet": "ab"}}))
    monkeypatch.setattr(inputs_module, "load_preset", lambda name: other)
    assert Records(graph).inputs("base") != before


OWN = """settings = [
    'domains.0.rewards=[{function="own_rewards:score"}]',
    'domains.1.rewards=[{function="own_package.parts:score", arguments={table="own.csv"}}]',
    'objective.advantage=own_rewards:advantage', 'objective.advantage_std=none',
]"""


@pytest.mark.parametrize(
    "edited",
    ["own_rewards.py", "own_package/helpers.py", "own.csv"],
)
def test_own_code_and_files_are_what_a_stage_is_made_from(
    graph_file, tmp_path, monkeypatch, edited
):
    monkeypatch.chdir(tmp_path)
    names = ("own_rewards.py", "own_package/parts.py", "own_package/helpers.py", "own.csv")
    for name in (*names, "other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    changed(graph_file, 'recipe = "stages/tiny-base"', f'recipe = "stages/tiny-base"\n{OWN}')
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7, minus=0.5)
    (tmp_path / "other.py").write_text("x = 22")
    assert Records(graph).is_unchanged("base")
    (tmp_path / edited).write_text("x = 22")
    assert Path(edited).name in Records(graph).changed_since("base")
    finish(graph, "base", plus=0.7, minus=0.5)
    (tmp_path / "own_package" / "more.py").write_text("")
    assert Records(graph).changed_since("base") == "changed: own_package/more.py"
    finish(graph, "base", plus=0.7, minus=0.5)
    (tmp_path / "own_package" / "more.py").unlink()
    assert Records(graph).changed_since("base") == "changed: own_package/more.py"


OWN_MODULES = {
    "own_rewards.py": "import json\nfrom near import score\n",
    "near.py": "def score():\n    import farther, datasets\n    from tools import words\n",
    "farther.py": "from near import score\nfrom . import other\n",
    "own_package/parts.py": "from own_package.helpers import x\n",
    "own_package/helpers.py": "import beside\nimport not_there.at_all\n",
    "beside.py": "from grpo_megatron import errors\nfrom datasets import load_dataset\n",
    "tools/words.py": "",
}


def test_what_own_modules_import_of_the_current_directory_is_own_code_too(
    graph_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    others = ("other.py", "datasets/script.py", "grpo_megatron/errors.py", "not_there.txt")
    for name in (*OWN_MODULES, *others, "own.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OWN_MODULES.get(name, "x = 1"))
    (tmp_path / "own_package" / "gone.py").symlink_to(tmp_path / "nowhere.py")
    changed(graph_file, 'recipe = "stages/tiny-base"', f'recipe = "stages/tiny-base"\n{OWN}')
    graph = load_graph(graph_file)
    files = {str(file) for file in own_files(graph.resolve("base").config)}
    assert files - {"own_package/gone.py", f"{tmp_path}/own.csv"} == set(OWN_MODULES)
    for name in OWN_MODULES:
        finish(graph, "base", plus=0.7, minus=0.5)
        (tmp_path / name).write_text("import other, (")
        assert Records(graph).changed_since("base").split(", ")[0] == f"changed: {name}"
        (tmp_path / name).write_text(OWN_MODULES[name])
        finish(graph, "base", plus=0.7, minus=0.5)
        assert Records(graph).changed_since("base") == ""


def test_folders_of_images_are_what_a_stage_is_made_from(tmp_path):
    config = resolve("demo/vision-count-cpu", [f"domains.0.image_folder={tmp_path}"]).config
    assert tmp_path in own_files(config)


def test_a_stage_alone_says_that_it_cannot_run(graph_file):
    said = []
    assert run_graph(load_graph(graph_file), said.append, only="soup") == ConfigError.exit_code
    assert said == ["soup: not run, because of one, two"]


def test_a_stage_that_waits_says_what_has_changed_in_others(graph_file):
    graph = load_graph(graph_file)
    for name in ("base", "one", "two"):
        finish(graph, name, plus=0.7, minus=0.5)
    write_resolved(graph.run_dir("one").config, graph.resolve("one"))
    graph = load_graph(changed(graph_file, "lr=1e-4", "lr=2e-4"))
    said = []
    run_graph(graph, said.append, only="soup")
    assert said == ["soup: not run, because of one (changed: optimizer.lr)"]


def test_a_stage_that_this_machine_cannot_serve_is_told_before_any_begins(graph_file, monkeypatch):
    def refuse(config):
        if config.optimizer.lr == 1e-4:
            raise ConfigError("heads of 120", where="the CPU build")

    monkeypatch.setattr(runner, "refuse_cpu_engine", refuse)
    monkeypatch.setattr(runner, "_run_stage", lambda *_, **__: pytest.fail("a stage began"))
    with pytest.raises(ConfigError, match="stage one, the CPU build"):
        run_graph(load_graph(graph_file), print)


def test_a_merge_leaves_its_job_alone(graph_file, monkeypatch):
    graph = load_graph(graph_file)
    for name in ("base", "one", "two"):
        finish(graph, name, plus=0.7)
    job = graph.run_dir("soup").slurm / "job"
    job.parent.mkdir(parents=True)
    job.write_text("7")
    monkeypatch.setattr(merge, "merge_checkpoints", lambda *_: None)
    assert run_graph(graph, print, only="soup") == 0
    assert job.exists() and graph.run_dir("soup").result.exists()


def test_submitting_keeps_what_was_begun_here(graph_file, monkeypatch):
    graph = load_graph(graph_file)
    begin(graph, "base")
    run_dir = graph.run_dir("base")
    run_dir.checkpoints.mkdir(parents=True)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(runner.slurm, "submit_again", lambda run_dir, after: "7")
    monkeypatch.setattr(runner.slurm, "submit", lambda resolved, site, after: "8")
    assert submit_graph(graph, "bare", print)["base"] == "7"
    assert run_dir.checkpoints.exists() and (run_dir.slurm / "train.sbatch").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["objective.advantage=no_such_module:f", "objective.advantage_std=none"],
            "no_such_module",
        ),
        (['domains.0.template="{question} {metadata[nothing]}"'], "nothing"),
    ],
)
def test_submitting_finds_what_a_stage_lacks_before_it_queues_one(
    graph_file, monkeypatch, settings, words
):
    recipe = 'recipe = "stages/tiny-base"'
    changed(graph_file, recipe, f"{recipe}\nsettings = {json.dumps(settings)}")
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    queued = []
    monkeypatch.setattr(runner.slurm, "submit", lambda resolved, site, after: queued.append(site))
    with pytest.raises(GrpoMegatronError, match=words) as caught:
        submit_graph(load_graph(graph_file), "bare", print, check_rewards=True)
    assert caught.value.where.startswith("stage base, ")
    assert queued == []


def test_submitting_waits_for_nobody(graph_file, monkeypatch):
    graph = load_graph(graph_file)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    with run_lock(Records(graph).directory), pytest.raises(RunLockedError):
        submit_graph(graph, "bare", print)


def test_a_closed_gate_stops_descendants_only(graph_file):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.65, minus=0.5)
    finish(graph, "one", plus=0.62, minus=0.5)
    finish(graph, "two", plus=0.1)
    assert states(graph) == {
        "base": "done",
        "one": "gate closed",
        "two": "done",
        "soup": "waiting",
        "final": "waiting",
    }
    text = "no domain drops more than 0.02 against " + str(graph.run_dir("base").root)
    assert Records(graph).closed_gates("one") == [text + " (seen: plus drops 0.03)"]
    finish(graph, "one", plus=0.65)
    assert Records(graph).closed_gates("one") == [text + " (seen: minus was not evaluated)"]


def test_a_changed_gate_is_checked_again_but_nothing_is_run_again(graph_file):
    graph = load_graph(graph_file)
    for name in ("base", "one", "two"):
        finish(graph, name, plus=0.55)
    assert states(graph)["one"] == "gate closed"
    said = []
    assert run_graph(graph, said.append, only="one") == GateError.exit_code  # and starts nothing
    assert any("one: failed" in line and "seen: 0.55" in line for line in said)
    graph = load_graph(changed(graph_file, "accuracy >= 0.6", "accuracy >= 0.5"))
    assert states(graph)["one"] == "done"
    graph = load_graph(changed(graph_file, ', "no domain drops more than 0.02 against base"', ""))
    assert states(graph)["one"] == "done"


def test_submitting_stops_at_a_wrong_site_before_it_removes_anything(graph_file):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7)
    changed(
        graph_file,
        'recipe = "stages/tiny-base"',
        'recipe = "stages/tiny-base"\nsettings = ["seed=4"]',
    )
    graph = load_graph(graph_file)
    with pytest.raises(ConfigError, match="no site 'bare_metl'"):
        submit_graph(graph, "bare_metl", print)
    assert graph.run_dir("base").result.exists()


@pytest.fixture
def slurm_tools(tmp_path, monkeypatch) -> Path:
    """A folder with stand-ins of Slurm's commands: `sbatch` refuses the job of number `refused`,
    `scontrol` says the state that is in `state`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    scripts = {
        "sbatch": f"""
n=$(($(cat {folder}/number 2>/dev/null) + 1)); echo $n > {folder}/number
if [ $n = "$(cat {folder}/refused)" ]; then echo 'sbatch: error: invalid account' >&2; exit 1; fi
echo $n
""",
        "scontrol": f"echo JobId=1 JobState=$(cat {folder}/state)\n",
        "scancel": f"echo $1 >> {folder}/cancelled; echo CANCELLED > {folder}/state\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    (folder / "state").write_text("COMPLETED")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    return folder


def a_changed_graph(graph_file, names):
    """A graph whose stages are done, and whose first one has another recipe since."""
    graph = load_graph(graph_file)
    for name in names:
        finish(graph, name, plus=0.7, minus=0.5)
        graph.run_dir(name).checkpoints.mkdir()
    recipe = 'recipe = "stages/tiny-base"'
    changed(graph_file, recipe, f'{recipe}\nsettings = ["seed=4"]')
    return load_graph(graph_file)


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_job_that_slurm_refuses_costs_no_stage_what_it_had(graph_file, slurm_tools, refused):
    names = ("base", "one", "two")
    graph = a_changed_graph(graph_file, names)
    (slurm_tools / "refused").write_text(str(refused))
    before = states(graph)
    with pytest.raises(ConfigError, match="invalid account"):
        submit_graph(graph, "bare", print)
    assert states(load_graph(graph_file)) == before
    for name in names:
        run_dir = graph.run_dir(name)
        assert run_dir.result.exists() and run_dir.export.exists() and run_dir.checkpoints.exists()
        assert not run_dir.slurm.exists()
    changed(graph_file, 'settings = ["seed=4"]', "")
    assert states(load_graph(graph_file))["base"] == "done"
    assert list((graph.root / "records").glob(".before-*")) == []
    if refused > 1:
        cancelled = (slurm_tools / "cancelled").read_text().split()
        assert cancelled == [str(job) for job in range(1, refused)]


def test_what_jobs_replace_goes_when_all_of_them_are_queued(graph_file, slurm_tools):
    graph = a_changed_graph(graph_file, ("base",))
    (slurm_tools / "refused").write_text("never")
    assert len(submit_graph(graph, "bare", print)) == 5
    assert not graph.run_dir("base").export.exists()
    assert list((graph.root / "records").glob(".before-*")) == []


def test_what_a_job_that_has_not_ended_replaced_is_kept_and_named(graph_file, slurm_tools):
    graph = a_changed_graph(graph_file, ("base",))
    (slurm_tools / "refused").write_text("2")
    (slurm_tools / "scancel").write_text("#!/bin/sh\necho COMPLETING > $(dirname $0)/state\n")
    with pytest.raises(ConfigError) as caught:
        submit_graph(graph, "bare", print)
    kept = graph.root / "records" / ".before-base"
    assert "job 1 of stage base has not ended" in caught.value.remedy
    assert str(kept) in caught.value.remedy and (kept / "result.json").exists()


def test_what_a_killed_submission_has_kept_is_put_back(graph_file, slurm_tools):
    graph = a_changed_graph(graph_file, ("base",))
    before = states(graph)
    ReplacedStages(Records(graph)).begin("base", goes_on=False)  # and no further
    assert not graph.run_dir("base").export.exists()
    (slurm_tools / "refused").write_text("1")
    with pytest.raises(ConfigError, match="invalid account"):
        submit_graph(load_graph(graph_file), "bare", print)
    assert graph.run_dir("base").result.exists() and graph.run_dir("base").export.exists()
    assert states(load_graph(graph_file)) == before


def test_what_a_stage_that_has_begun_has_replaced_is_not_put_back(graph_file, slurm_tools):
    graph = a_changed_graph(graph_file, ("base",))
    replaced = ReplacedStages(Records(graph))
    replaced.begin("base", goes_on=False)
    (graph.run_dir("base").root / "logs" / "latest").mkdir(parents=True)
    ReplacedStages(Records(graph)).put_back_left()
    assert not graph.run_dir("base").export.exists()
    assert (replaced.place("base") / "export").exists()


def test_a_stage_that_did_not_get_to_start_is_no_stage_that_goes_on(
    graph_file, tmp_path, monkeypatch
):
    """It would end at once, with the weights of what it was to replace."""
    graph = a_changed_graph(graph_file, ("base",))
    fails = tmp_path / "fails"
    fails.write_text('#!/bin/sh\necho "$@" > "$0.arguments"; exit 10\n')
    fails.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(fails))
    assert run_graph(graph, print, only="base") == 10
    given = (tmp_path / "fails.arguments").read_text().split()
    record = graph.root.absolute() / "records" / "base.json"
    assert given[-3:] == ["--stage", str(record), "--overwrite"]
    assert states(load_graph(graph_file))["base"] == "ready"
    changed(graph_file, 'settings = ["seed=4"]', "")
    assert states(load_graph(graph_file))["base"] == "done"


@pytest.mark.parametrize("damage", ["cut", "gone", "no config"])
def test_a_checkpoint_that_is_damaged_is_made_anew(graph_file, damage):
    """While somebody is still to take it: else every stage that builds on it would fail."""
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7, minus=0.5)
    assert states(graph)["base"] == "done"
    export = graph.run_dir("base").export
    if damage == "cut":
        (export / "model.safetensors").write_bytes(WITHOUT_TENSORS[:-1])
    elif damage == "gone":
        (export / "model.safetensors").unlink()
    else:
        (export / "config.json").unlink()
    assert states(graph)["base"] == "begun"


def test_status_says_what_has_changed_and_shows_no_older_result(graph_file, capsys):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7, minus=0.5, all=0.625)
    write_resolved(graph.run_dir("base").config, graph.resolve("base"))
    assert main(["stages", "status", str(graph_file)]) == 0
    assert "0.625" in capsys.readouterr().out
    recipe = 'recipe = "stages/tiny-base"'
    changed(graph_file, recipe, f'{recipe}\nsettings = ["seed=4", "optimizer.lr=1e-3"]')
    assert main(["stages", "status", str(graph_file)]) == 0
    said = capsys.readouterr().out
    assert "changed: seed, optimizer.lr" in said and "0.625" not in said


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompts": 8.0, "accuracy": 0.625}, "0.625"),
        (
            {"prompts": 8.0, "accuracy": 0.5, "accuracy_unscorable": 4.0},
            "0.500 (4 of 8 prompts could not be scored)",
        ),
        (
            {"prompts": 8.0, "accuracy_unscorable": 8.0},
            "unknown (unreliable: 8 of 8 prompts could not be scored)",
        ),
        ({"prompts": 0.0}, ""),
    ],
)
def test_status_says_what_could_not_be_scored(graph_file, capsys, values, told):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7, minus=0.5)
    file = graph.run_dir("base").result
    result = json.loads(file.read_text())
    result["eval"]["all"] = values
    file.write_text(json.dumps(result))
    write_resolved(graph.run_dir("base").config, graph.resolve("base"))
    assert main(["stages", "status", str(graph_file)]) == 0
    said = capsys.readouterr().out
    assert told in said and ("unknown" in said) == ("unknown" in told)


def test_what_cannot_be_read_of_a_stage_is_told(graph_file):
    graph = load_graph(graph_file)
    finish(graph, "base", plus=0.7, minus=0.5)
    assert Records(graph).changed_since("base") == ""
    graph.run_dir("base").config.write_text('{"config": 1, "provenance": {}}')
    assert Records(graph).changed_since("base") == "its config.json is damaged"
    finish(graph, "base", plus=0.7, minus=0.5)
    graph.run_dir("base").stage_record.write_text("{}x")
    assert "`stage` is damaged" in Records(graph).changed_since("base")


def test_a_merge_waits_for_nobody(graph_file, capfd):
    graph = load_graph(graph_file)
    for name in ("base", "one", "two"):
        finish(graph, name, plus=0.7)
    with run_lock(graph.run_dir("soup")):
        assert run_graph(graph, print, only="soup") == RunLockedError.exit_code
    assert "is being written by" in capfd.readouterr().err
    assert states(graph)["soup"] == "ready"


def test_submitting_names_what_a_closed_gate_holds_back(graph_file, monkeypatch):
    graph = load_graph(graph_file)
    for name in ("base", "one"):
        finish(graph, name, plus=0.55)
    submitted = []
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(
        runner, "_submit", lambda graph, replaced, name, site, after: submitted.append(name) or "7"
    )
    said = []
    assert submit_graph(graph, "bare", said.append) == {"two": "7"}
    assert submitted == ["two"] and "soup: not run, because of one" in said


INTERRUPTED_GRAPH = """
import signal, sys
from grpo_megatron.stages import runner
from grpo_megatron.stages.loading import load_graph

file, fake, before = sys.argv[1:]
signal.signal(signal.SIGINT, getattr(signal, before))
runner.sys.executable = fake
sys.exit(runner.run_graph(load_graph(file), print))
"""


@pytest.mark.parametrize("number", ["INT", "TERM"])
@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"])
@pytest.mark.parametrize("when", ["as soon as it lives", "later"])
def test_an_interrupt_reaches_the_stage_whoever_sends_it(
    graph_file, tmp_path, number, before, when
):
    """Once: a second one would end it without a checkpoint. A shell starts the jobs that it puts
    in the background with SIGINT ignored. A stage may live before `Popen` has returned. Signals go
    to a process group of their own: here they would end the tests."""
    fake = tmp_path / "python"
    wait = "sleep 0.5; " if when == "later" else ""
    fake.write_text(
        "#!/bin/bash\ntrap 'echo once >> interrupts; exit 130' INT\n"
        f"{wait}kill -{number} $PPID\nwhile :; do sleep 0.1; done\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_GRAPH, graph_file, fake, before],
        cwd=tmp_path,
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert (tmp_path / "interrupts").read_text() == "once\n"


def test_between_stages_the_first_interrupt_is_noted_and_the_second_stops():
    interrupts = InterruptForwarder()
    interrupts._handle(signal.SIGINT, None)
    assert interrupts.pending
    with pytest.raises(KeyboardInterrupt):
        interrupts._handle(signal.SIGINT, None)


def test_handlers_are_as_before_a_graph_ran():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with InterruptForwarder().installed():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


RESULT = {"seconds": 12.0, "eval": {"math": {"accuracy": 0.5, "pass_at_4": 0.75}}}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("eval.math.accuracy >= 0.5", None),
        ("eval.math.accuracy > 0.5", "0.5"),
        ("eval.math.pass_at_4 < 0.7", "0.75"),
        ("seconds <= 12", None),
        ("seconds <= 1e1", "12"),
        ("seconds <= 1.e+1", "12"),
        ("seconds <= 1E1", "12"),
        ("seconds <= +11.", "12"),
    ],
)
def test_gates(text, seen):
    assert parse_gate(text).check(RESULT) == seen


def test_every_field_of_a_graph_has_a_remedy_for_wrong_values():
    assert set(loading._VALUES) == {*loading.GraphFile.model_fields, *loading.Stage.model_fields}


@pytest.mark.parametrize(
    ("old", "new", "message", "remedy"),
    [
        ("runs_dir =", "settigs = []\nruns_dir =", "settigs: unknown key", "'settings'"),
        ('name = "tiny"', 'nmae = "tiny"', "nmae: unknown key", "'name'"),
        ('name = "tiny"', "", "name: is required", "add name to the graph"),
        ("runs_dir =", 'settings = "seed=3"\nruns_dir =', "settings: must be a", '["seed=3"]'),
        ("inputs =", "input =", "stages.one.input: unknown key", "did you mean 'inputs'"),
        ("inputs =", "recpie = 1\ninputs =", "stages.one.recpie: unknown key", "'recipe'"),
        (
            "inputs =",
            'dtype = "float8"\ninputs =',
            "must be one of: float32, bf",
            "dtype takes float32, bf",
        ),
        ("one = 0.5", "one = -1", "merge.one: must be more than 0", "with numbers above 0"),
        ("one = 0.5", 'one = "x"', "stages.soup.merge.one: ", "merge takes a table of stages"),
        ("one = 0.5", 'one = "1"', "merge.one: must be a number", "with numbers above 0"),
        ("one = 0.5", "one = true", "merge.one: must be a number", "with numbers above 0"),
        ("{ one = 0.5, two = 0.5 }", "{}", "exactly one of", "merge is empty, and takes a table"),
        ('export = "soup"\ndtype = "bfloat16"', "", "exactly one of", "add a recipe: the path"),
        ('recipe = "stages/tiny-base"', "recipe = 1", "base.recipe: must be text", "of a recipe"),
        ('export = "soup"', "export = 1", "final.export: must be text", "the name of a stage"),
        ('{ "model.path" = "base" }\nset', "1\nset", "inputs: must be a table", '"model.path"'),
        ("[stages.base]", "[stages]\nx = 1\n[stages.base]", "stages.x: ", "for each stage"),
        ('name = "tiny"', 'name = "a/b"', "name: must match", "name takes the name of a dir"),
        ("[stages.base]", "settings = [1]\n[stages.base]", "settings.0: must be", '["seed=1"]'),
    ],
)
def test_a_wrong_key_of_a_graph_is_told_in_its_words(graph_file, old, new, message, remedy):
    with pytest.raises(ConfigError) as error:
        load_graph(changed(graph_file, old, new))
    assert message in error.value.message and remedy in error.value.remedy
    assert "graph.toml" in error.value.where and "valid" not in error.value.message


def test_gates_of_a_stage_are_a_list(graph_file):
    text = re.sub(r"gates = .*", 'gates = "steps >= 1"', graph_file.read_text())
    graph_file.write_text(text)
    with pytest.raises(ConfigError, match=r"stages.one.gates: must be a list") as error:
        load_graph(graph_file)
    assert error.value.remedy == 'write gates = ["steps >= 1"]'


def unscorable(count: float, **shares: float) -> dict:
    """A result of 8 prompts, of which `count` could not be scored."""
    counts = {f"{name}_unscorable": count for name in ("accuracy", "pass_at_4")}
    return {"seconds": 1.0, "eval": {"math": {"prompts": 8.0, **shares, **counts}}}


@pytest.mark.parametrize(
    "text",
    ["eval.math.accuracy >= 0.5", "eval.math.accuracy_low >= 0.1", "eval.math.pass_at_4 >= 0.5"],
)
def test_a_gate_on_a_share_of_too_few_prompts_is_closed(text):
    shares = {"accuracy": 1.0, "accuracy_low": 0.2, "pass_at_4": 1.0}
    gate = parse_gate(text)
    assert gate.check(unscorable(0.0, **shares)) is None
    assert gate.check(unscorable(4.0, **shares)) is None
    assert "unreliable: 5 of 8 prompts could not be scored" in gate.check(unscorable(5.0, **shares))
    told = parse_gate("eval.math.accuracy >= 0.5").check(unscorable(8.0))
    assert told == "unknown (unreliable: 8 of 8 prompts could not be scored)"


def test_a_gate_may_ask_how_many_could_not_be_scored():
    gate = parse_gate("eval.math.accuracy_unscorable <= 6")
    assert gate.check(unscorable(6.0, accuracy=1.0)) is None
    assert gate.check(unscorable(7.0, accuracy=1.0)) == "7"


def test_a_drop_to_or_from_an_unreliable_accuracy_is_no_open_gate(tmp_path):
    gate = parse_gate(f"no domain drops more than 1 against {tmp_path}")
    file = tmp_path / "result.json"
    file.write_text(json.dumps(unscorable(4.0, accuracy=0.5)))
    assert gate.check(unscorable(4.0, accuracy=0.5)) is None
    seen = gate.check(unscorable(5.0, accuracy=0.75))
    assert seen.startswith("math is 0.750 (unreliable: 5 of 8") and "was 0.500 (4 of 8" in seen
    file.write_text(json.dumps(unscorable(8.0)))
    assert "was unknown" in gate.check(unscorable(0.0, accuracy=0.5))


@pytest.mark.parametrize("text", ["eval.maths.accuracy >= 0.5", "eval.math >= 0.5"])
def test_a_gate_on_what_is_not_there_is_closed(text):
    seen = parse_gate(text).check(RESULT)
    assert "math" in seen or "no number" in seen


MEASURED = ["seconds", "eval.math.accuracy", "eval.math.prompts", "eval.all.accuracy"]


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("eval.maths.accuracy >= 0.5", "eval.math.accuracy"),
        ("eval.math.acuracy >= 0.5", "eval.math.accuracy"),
        ("eval.math >= 0.5", "eval.math.prompts"),
        ("eval.math.accuracy.mean >= 0.5", "eval.math.accuracy"),
        ("eval.math.pass_at_4 >= 0.5", "evaluation.num_samples"),
        ("second <= 3", "seconds"),
        ("evel.math.accuracy > 0", "eval.math.accuracy"),
    ],
)
def test_a_gate_that_no_run_can_measure_is_refused(text, near):
    with pytest.raises(ConfigError, match="no run like this measures") as error:
        parse_gate(text, MEASURED)
    assert near in error.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        "eval.math.accuracy >= 60",
        "eval.all.accuracy >= 1.6",
        "eval.all.accuracy > 1",
        "eval.math.accuracy < 0",
        "eval.math.accuracy <= -0.1",
        "no domain drops more than 2 against a",
    ],
)
def test_a_gate_on_what_no_accuracy_is_is_refused(text):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        parse_gate(text, MEASURED)
    parse_gate(text)  # of a run that began before


@pytest.mark.parametrize(
    "text",
    [
        "eval.math.accuracy >= 1",
        "eval.math.accuracy <= 0",
        "eval.math.prompts >= 8",
        "seconds <= 3600",
        "no domain drops more than 1 against a",
    ],
)
def test_gates_at_the_ends_are_gates(text):
    assert parse_gate(text, MEASURED).text == text


def test_a_drop_gate_needs_something_to_compare(tmp_path):
    gate = parse_gate(f"no domain drops more than .1 against {tmp_path / 'a run'}")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "result.json").write_text('{"seconds": 1.0}')
    assert gate.limit == 0.1 and gate.check(RESULT) == "nothing was evaluated there"


def test_a_drop_to_or_from_nan_is_no_open_gate(tmp_path):
    gate = parse_gate(f"no domain drops more than 1 against {tmp_path}")
    file = tmp_path / "result.json"
    file.write_text('{"seconds": 1.0, "eval": {"math": {"accuracy": 0.5}}}')
    assert gate.check({"eval": {"math": {"accuracy": math.nan}}}) == "math drops nan"
    assert gate.check({"eval": {"math": {"prompts": 8.0}}}) == "math drops nan"
    file.write_text('{"seconds": 1.0, "eval": {"math": {"accuracy": NaN}}}')
    assert gate.check(RESULT) == "math drops nan"


def test_a_stage_is_compared_where_it_may_evaluate_the_same(graph_file):
    """With fewer prompts held out than domains nobody knows which are evaluated."""
    new = (
        '[stages.other]\nrecipe = "stages/tiny-base"\nsettings = ["data.num_heldout=2"]\n'
        '[stages.compared]\nrecipe = "stages/tiny-gsm8k"\n'
        'gates = ["no domain drops more than 0.1 against other"]\n[stages.base]\n'
    )
    assert "compared" in load_graph(changed(graph_file, "[stages.base]\n", new)).order


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_of_python_is_one_of_a_gate(limit):
    assert parse_gate(f"seconds <= {limit!r}").limit == limit
    assert parse_gate(f"seconds <= {limit:+E}").limit == float(f"{limit:E}")


def test_paths_of_drop_gates_start_at_the_root(tmp_path):
    gate = parse_gate("no domain drops more than 0.1 against ./a").below(tmp_path)
    assert gate.against == tmp_path / "a" and gate.text.endswith(f"against {tmp_path / 'a'}")


@pytest.mark.parametrize("text", ["seconds <= 1.2.3", "no domain drops more than 1.2.3 against a"])
def test_a_number_is_a_number(text):
    with pytest.raises(ConfigError, match="is not a gate"):
        parse_gate(text)


EXPERTS = """
name = "tiny"
runs_dir = "{runs}"

[stages.base]
recipe = "stages/tiny-base"

[stages.experts]
recipe = "stages/tiny-domain-experts"
inputs = {{ "model.path" = "base" }}

[stages.soup]
merge = {{ "experts/plus" = 0.5, "experts/minus" = 0.5 }}

[stages.judged]
recipe = "stages/tiny-expert"
inputs = {{ "model.path" = "experts/mixed" }}
settings = ["kind=eval", "num_steps=0"]

[stages.distilled]
recipe = "stages/tiny-distil"
[stages.distilled.inputs]
"model.path" = "base"
"distillation.teachers.0.path" = "experts/plus"
"distillation.teachers.1.path" = "experts/minus"
"distillation.teachers.2.path" = "experts/mixed"
"""


@pytest.fixture
def experts_file(tmp_path) -> Path:
    file = tmp_path / "graph.toml"
    file.write_text(EXPERTS.format(runs=tmp_path / "runs"))
    return file


def test_a_stage_takes_the_checkpoint_of_one_domain(experts_file, tmp_path):
    graph = load_graph(experts_file)
    exports = tmp_path / "runs" / "tiny" / "experts" / "export"
    assert graph.levels() == [["base"], ["experts"], ["soup", "judged", "distilled"]]
    config = graph.resolve("distilled").config
    assert config.distillation is not None
    paths = [teacher.path for teacher in config.distillation.teachers]
    assert paths == [exports / "plus", exports / "minus", exports / "mixed"]
    assert f'model.path="{exports / "mixed"}"' in graph.recipe_arguments("judged")
    assert graph.taken("soup", "experts") == [exports / "plus", exports / "minus"]
    assert graph.takers("experts") == ["soup", "judged", "distilled"]
    assert graph.input("domains.0.path", "experts") == exports.parent  # its recorded samples
    assert graph.input("lora.path", "experts/plus") == exports.parent / "adapter" / "plus"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('= "experts/mixed" }', '= "experts" }', "write 'experts/plus', for example"),
        ('= "experts/mixed" }', '= "experts/mixd" }', "did you mean 'experts/mixed'"),
        ('= "experts/mixed" }', '= "base/mixed" }', "write 'base'"),
        ('= "experts/mixed" }', '= "expert/mixed" }', "did you mean 'experts'"),
        ('"experts/plus" = 0.5', '"experts" = 0.5', "a checkpoint for each of its domains"),
    ],
)
def test_a_domain_that_gives_no_checkpoint_is_one_message(experts_file, old, new, words):
    with pytest.raises(ConfigError) as caught:
        load_graph(changed(experts_file, old, new))
    assert words in str(caught.value)


def test_a_last_stage_has_a_checkpoint_of_every_domain(tmp_path):
    file = tmp_path / "graph.toml"
    text = EXPERTS.format(runs=tmp_path / "runs")
    file.write_text(text[: text.index("[stages.soup]")])
    graph = load_graph(file)
    for name in ("base", "experts"):
        finish(graph, name, plus=0.7)
    assert states(graph)["experts"] == "begun"
    for domain in ("plus", "minus", "mixed"):
        checkpoint = graph.output("experts") / domain
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes(WITHOUT_TENSORS)
    assert states(graph)["experts"] == "done"
